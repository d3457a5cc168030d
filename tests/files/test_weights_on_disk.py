"""A checkpoint whose weights are damaged or not complete is refused by every command alike."""

from __future__ import annotations

import json

import pytest
import torch

from gemma4_compat.errors import InputError
from gemma4_compat.files import checkpoint as files
from tests import damage
from tests.files.test_checkpoint import copy, header_only, sharded_dir  # noqa: F401
from tests.support import load_model, run_command

COMMANDS = {
    "plan": ("--gpu", "8GiB", "--context", "64"),
    "map": ("--map", '{"": 0}'),
    "scan": ("--targets", "q_proj"),
}


def half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def four_bytes(file):
    file.write_bytes(file.read_bytes()[:4])


def broken_link(file):
    """As in a folder of the Hub's cache whose blob was not downloaded."""
    file.unlink()
    file.symlink_to("../../blobs/0123")


DAMAGED = {
    "half": (half, "cut off, "),
    "4 bytes": (four_bytes, "cut off in the safetensors header (4 bytes): download it again"),
    "10 bytes less": damage.CUT_OFF,
    "empty": damage.SAFETENSORS["empty"],
    "pointer": (
        lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "run git lfs pull",
    ),
    "missing": (lambda file: file.unlink(), "no such file"),
    "broken link": (broken_link, "no such file"),
}


@pytest.fixture(params=["one file", "shards"])
def weights(request, model_dir, sharded_dir, tmp_path):  # noqa: F811
    """A file of weights in a copy of a checkpoint: the only one, or one of several."""
    copy(model_dir if request.param == "one file" else sharded_dir, tmp_path)
    return sorted(tmp_path.glob("model*.safetensors"))[-1]


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_weights(weights, kind, capsys):
    change, message = DAMAGED[kind]
    change(weights)
    if kind == "missing" and weights.name == files.WEIGHTS:
        pytest.skip("a folder without weights; see test_no_weights_yet")
    with pytest.raises(InputError) as refused:  # as merge says it
        files.weight_headers(weights.parent)
    assert f"{weights}: " in str(refused.value)
    assert message in str(refused.value)
    for command, options in COMMANDS.items():
        assert run_command(command, weights.parent, *options) == 2, command
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err == f"gemma4-compat {command}: {refused.value}\n"


def test_no_weights_yet(weights, capsys):
    """The config, with or without the index, is enough; so are headers without their data."""
    folder = weights.parent
    for command, options in COMMANDS.items():
        assert run_command(command, folder, *options) == 0
        expected = capsys.readouterr().out
        for file in folder.glob("model*.safetensors"):
            header_only(file)
        assert run_command(command, folder, *options) == 0
        assert capsys.readouterr().out == expected
    for file in folder.glob("model*.safetensors"):
        file.unlink()
    for command, options in COMMANDS.items():
        assert run_command(command, folder, *options) == 0


# -- weights and the config ------------------------------------------------------------------------

QUERY = "model.language_model.layers.1.self_attn.q_proj.weight"
TABLE = "model.language_model.embed_tokens.weight"


def without(name):
    return lambda tensors: {own: each for own, each in tensors.items() if name not in own}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(QUERY), f"{QUERY} must be of shape (128, 128), and is missing"),
        (lambda t: t | {QUERY: t[QUERY][:32].clone()}, f"{QUERY} must be of shape"),
        (lambda t: t | {TABLE: torch.cat([t[TABLE]] * 2)}, "(512, 128), and is (1024, 128)"),
        (without(TABLE), f"{TABLE} must be of shape (512, 128), and is missing"),
        # complete ones
        (lambda t: without(TABLE)(t) | {"lm_head.weight": t[TABLE].clone()}, None),
        (lambda t: t | {"lm_head.weight": t[TABLE].clone()}, None),
        (lambda t: without(".3.self_attn.k_proj")(without(".4.self_attn.v_proj")(t)), None),
        (lambda t: t | {"model.drafter.norm.weight": torch.ones(3)}, None),
        (lambda t: {n.replace(".language_model.", "."): each for n, each in t.items()}, None),
    ],
)
def test_weights_that_do_not_fit_the_config(model_dir, tmp_path, change, message, capsys):
    from safetensors.torch import load, save_file

    copy(model_dir, tmp_path)
    file = tmp_path / files.WEIGHTS
    save_file(change(load(file.read_bytes())), file, metadata={"format": "pt"})
    for command, options in COMMANDS.items():
        assert run_command(command, tmp_path, *options) == (2 if message else 0)
        said = capsys.readouterr().err
        assert (message or "") in said
        assert said.count("\n") == bool(message)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_weights_fit(model_dir, tmp_path, kind):
    load_model(model_dir, kind).save_pretrained(tmp_path)
    for command, options in COMMANDS.items():
        assert run_command(command, tmp_path, *options) == 0


@pytest.mark.parametrize("shared", [4, 6, 7])
def test_layers_that_reuse_the_keys_of_no_layer(model_dir, tmp_path, shared, capsys):
    copy(model_dir, tmp_path)
    file = tmp_path / files.CONFIG
    config = json.loads(file.read_text())
    config["text_config"]["num_kv_shared_layers"] = shared
    file.write_text(json.dumps(config))
    for command, options in COMMANDS.items():
        assert run_command(command, tmp_path, *options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{file}: num_kv_shared_layers is too large: " in line
        assert "full_attention" in line
