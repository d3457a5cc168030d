"""A checkpoint whose weights are damaged or not complete is refused by every command alike."""

from __future__ import annotations

import pytest

from gemma4_compat.errors import InputError
from gemma4_compat.files import checkpoint as files
from tests import damage
from tests.files.test_checkpoint import copy, header_only, sharded_dir  # noqa: F401
from tests.support import run_command

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
