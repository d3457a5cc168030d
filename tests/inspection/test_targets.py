"""Scans, compared with the adapters that the real PEFT creates."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import gemma4_compat
from gemma4_compat.cli.scan import _targets as parse_targets
from gemma4_compat.errors import InputError
from gemma4_compat.inspection import scan_targets
from gemma4_compat.results.text import size
from gemma4_compat.tiny import BROAD_TARGETS
from tests.support import new_model, run_command

peft = pytest.importorskip("peft")


def run(*arguments):
    return run_command("scan", *arguments)


def classes(found):
    return {(match.tower, match.name): match.count for match in found.matches}


def made(model, targets, rank):
    """Parameters, layers and dtypes of the adapter that PEFT creates."""
    targets = targets if isinstance(targets, str) else list(targets)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=targets))
    adapters = {n: p for n, p in adapted.named_parameters() if "lora_" in n}
    layers = {n.partition(".lora_")[0].removeprefix("base_model.model.") for n in adapters}
    return sum(p.numel() for p in adapters.values()), layers, {p.dtype for p in adapters.values()}


# -- E2B ------------------------------------------------------------------------------------------


def test_the_users_figures(e2b_dir):
    """148 Gemma4ClippableLinear and 205 linear layers, 353 in all."""
    found = scan_targets(e2b_dir, BROAD_TARGETS)
    assert found.count == 353
    assert classes(found) == {
        ("language", "Linear"): 205,
        ("vision", "Gemma4ClippableLinear"): 112,
        ("audio", "Gemma4ClippableLinear"): 36,
    }
    assert found.needs == ("clippable_linear",)
    assert found.ok
    text = " ".join(str(found).split())
    assert "148 Gemma4ClippableLinear: PEFT alone raises" in text
    assert "needs the patch clippable_linear" in text


def test_inner_layers_need_no_patch(e2b_dir):
    """The targets that users name to avoid the wrappers leave out the language model."""
    found = scan_targets(e2b_dir, [f"{name}.linear" for name in BROAD_TARGETS])
    assert classes(found) == {("vision", "Linear"): 112, ("audio", "Linear"): 36}
    assert found.needs == ()
    assert any("the language model gets no adapter" in note for note in found.notes)


def test_wrapper_and_inner_layer_are_one_adapter(e2b_dir):
    outer = scan_targets(e2b_dir, r".*_tower\..*\.(q_proj|v_proj)")
    both = scan_targets(e2b_dir, r".*_tower\..*\.(q_proj|v_proj)(\.linear)?")
    assert both.count == 2 * outer.count == 2 * (2 * 16 + 2 * 12)
    assert both.layers == outer.layers
    assert both.parameters == outer.parameters


# -- against PEFT ---------------------------------------------------------------------------------

TARGETS = [
    BROAD_TARGETS,
    ["q_proj.linear", "k_proj", "embed_tokens"],
    r".*\.(q_proj|v_proj)(\.linear)?",
    r".*language_model.*\.(o_proj|per_layer_input_gate)",
    "all-linear",
    ["conv", "input_proj", "embedding_projection"],
]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_as_peft_makes_it(model_dir, targets):
    found = scan_targets(model_dir, targets, rank=8)
    parameters, layers, dtypes = made(new_model(model_dir), targets, 8)
    assert set(found.layers) == layers
    assert found.parameters == parameters
    assert dtypes == {torch.float32}
    assert f"{size(4 * parameters)} in float32" in str(found)


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_names_the_patch_where_it_is_needed(model_dir, targets):
    found = scan_targets(model_dir, targets, rank=8)
    with gemma4_compat.disabled("clippable_linear"):
        if found.needs:
            with pytest.raises(ValueError, match=r"(?s)Target module .*ClippableLinear.* is not"):
                made(new_model(model_dir), targets, 8)
        else:
            assert made(new_model(model_dir), targets, 8)[0] == found.parameters


def test_an_adapter_of_true_size(e2b_dir):
    from gemma4_compat.model import meta

    found = scan_targets(e2b_dir, BROAD_TARGETS, rank=32)
    parameters, layers, _ = made(meta.meta_model(e2b_dir), BROAD_TARGETS, 32)
    assert (found.parameters, set(found.layers)) == (parameters, layers)


def test_llama(llama_dir):
    from transformers import LlamaForCausalLM

    found = scan_targets(llama_dir, ["q_proj", "down_proj"], rank=4)
    model = LlamaForCausalLM.from_pretrained(llama_dir)
    assert found.parameters == made(model, ["q_proj", "down_proj"], 4)[0]
    assert classes(found) == {("language", "Linear"): 4}
    assert found.needs == ()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized(model_dir, tmp_path, kind):
    """Saved and loaded quantized models, with the class names that the users saw."""
    pytest.importorskip("bitsandbytes")
    name = "Linear4bit" if kind == "nf4" else "Linear8bitLt"
    model = new_model(model_dir, kind)
    model.save_pretrained(tmp_path)
    loaded, saved = (scan_targets(each, BROAD_TARGETS) for each in (model, tmp_path))
    assert classes(loaded) == classes(saved)
    assert (
        classes(saved)["language", name]
        == classes(scan_targets(model_dir, BROAD_TARGETS))["language", "Linear"]
    )
    inner = [scan_targets(each, ["q_proj.linear"]) for each in (model, tmp_path)]
    # This checkpoint leaves some modules unquantized, such as the audio tower.
    assert {*map(str, map(classes, inner))} == {str({("vision", name): 2, ("audio", "Linear"): 2})}
    assert saved.parameters == loaded.parameters == made(model, BROAD_TARGETS, 16)[0]


def test_a_model_that_has_an_adapter(model_dir, language_adapter_dir):
    model = new_model(model_dir)
    before = scan_targets(model, BROAD_TARGETS)
    model = peft.PeftModel.from_pretrained(model, language_adapter_dir)
    state = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    after = scan_targets(model, BROAD_TARGETS)
    assert (after.matches, after.layers) == (before.matches, before.layers)
    assert {n: id(t) for n, t in model.state_dict(keep_vars=True).items()} == state


def test_what_lora_cannot_adapt(model_dir):
    found = scan_targets(model_dir, r".*\.self_attn")
    assert not found.ok
    assert not found.layers
    with pytest.raises(
        ValueError, match=r"(?s)Target module Gemma4\w+Attention.* is not supported"
    ):
        made(new_model(model_dir), r".*\.self_attn", 8)


def test_rank_that_a_grouped_convolution_cannot_have(model_dir):
    targets = ["depthwise_conv1d"]
    found = scan_targets(model_dir, targets, rank=8)
    assert not found.ok
    with pytest.raises(ValueError, match="divisible by groups"):
        made(new_model(model_dir), targets, 8)


def test_nothing_matches(model_dir):
    found = scan_targets(model_dir, ["multi_modal_projector"])
    assert not found.ok
    assert found.verdict.startswith("no module matches: ")
    assert found.verdict in " ".join(str(found).split())
    with pytest.raises(ValueError, match="not found in the base model"):
        made(new_model(model_dir), ["multi_modal_projector"], 8)
    some = scan_targets(model_dir, ["multi_modal_projector", "q_proj"])
    assert some.count == 10
    assert "multi_modal_projector matches no module" in str(some)
    misspelt = scan_targets(model_dir, ["q_porj", "v_proj"])
    assert "q_porj matches no module of this model (did you mean q_proj?)" in misspelt.notes


# -- arguments and the command --------------------------------------------------------------------


def test_parse_targets():
    assert parse_targets("q_proj") == ("q_proj",)
    assert parse_targets("q_proj, v_proj.linear") == ("q_proj", "v_proj.linear")
    assert parse_targets("all-linear") == "all-linear"
    assert parse_targets(r".*\.(q|v)_proj") == r".*\.(q|v)_proj"
    assert parse_targets(r".*layers\.\d{1,2}\.mlp") == r".*layers\.\d{1,2}\.mlp"


def test_arguments(model_dir, tmp_path):
    for error, call in (
        (InputError, lambda: scan_targets(model_dir, "(q_proj")),
        (InputError, lambda: scan_targets(model_dir, [])),
        (InputError, lambda: scan_targets(model_dir, ["q_proj"], rank=0)),
        (InputError, lambda: scan_targets(tmp_path, ["q_proj"])),
    ):
        with pytest.raises(error):
            call()


def test_command(model_dir, capsys):
    assert run(model_dir, "--targets", ",".join(BROAD_TARGETS)) == 0
    printed = capsys.readouterr().out
    assert "20 Gemma4ClippableLinear" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "\033" not in printed
    assert run(model_dir, "--targets", ".*self_attn") == 1
    assert run(model_dir, "--targets", "nothing_of_this_name") == 1


def test_command_json(model_dir, capsys):
    assert run(model_dir, "--targets", "q_proj,v_proj", "--rank", 4, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "model", "architecture", "targets", "matches", "layers", "needs", "rank",
        "parameters", "count", "ok", "notes",
    }  # fmt: skip
    assert found["targets"] == ["q_proj", "v_proj"]
    assert found["needs"] == ["clippable_linear"]
    assert found["count"] == sum(match["count"] for match in found["matches"])
    assert {"tower", "name", "count", "takes"} == set(found["matches"][0])


def test_command_names_what_is_wrong(model_dir, tmp_path, capsys):
    broken = tmp_path / "config.json"
    broken.write_text('{"model_type": "gemma4"')
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "no_such_model"}')
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    (quantized / "config.json").write_text(
        '{"model_type": "no_such_model", "quantization_config": {"quant_method": "gptq"}}'
    )
    for arguments, message in (
        ((tmp_path / "nowhere", "--targets", "q_proj"), f"{tmp_path / 'nowhere'}: no such folder"),
        ((tmp_path, "--targets", "q_proj"), f"{broken}: not JSON"),
        ((unknown, "--targets", "q_proj"), f"{unknown / 'config.json'}: not understood"),
        ((quantized, "--targets", "q_proj"), f"{quantized / 'config.json'}: not understood"),
        ((model_dir, "--targets", "(q_proj"), "--targets: '(q_proj' is not a regular expression"),
        ((model_dir, "--targets", "q_proj", "--rank", 0), "--rank: '0' is not a whole number"),
    ):
        assert run(*arguments) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith(f"gemma4-compat scan: {message}")


def test_in_a_notebook(e2b_dir):
    """IPython prints the whole text; the ``repr`` is one line."""
    found, printed = scan_targets(e2b_dir, ["q_proj"]), []
    found._repr_pretty_(SimpleNamespace(text=printed.append), False)
    assert printed == [str(found)]
    assert repr(found) == f"<{type(found).__name__}: {found.verdict}>"
    assert "\n" not in repr(found)
