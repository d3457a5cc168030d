"""Each setting of an adapter's config: the verdict, against what PEFT does with the adapter."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load

from gemma4_compat.errors import InputError
from gemma4_compat.inspection import inspect_adapter
from tests.inspection.test_adapter import WEIGHTS, changed, counts, reasons
from tests.support import load_model

peft = pytest.importorskip("peft")

TARGETS = r".*language_model.*\.[qo]_proj"
TOWERS = r".*(language_model.*\.q_proj|vision_tower.*\.q_proj\.linear)"


LISTED = {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ".*(vision|audio).*"}


def replaced(*names, by=torch.zeros_like):
    return lambda tensors: {
        name: by(t) if any(part in name for part in names) else t for name, t in tensors.items()
    }


def rank(number, part=""):
    """The tensors of a layer, cut to another rank."""

    def cut(tensors):
        kept = {}
        for name, t in tensors.items():
            if part in name:
                t = t[:number] if "lora_A" in name else t[:, :number] if "lora_B" in name else t
            kept[name] = t.contiguous()
        return kept

    return cut


def same(tensors):
    return tensors


#: name -> the settings it was trained with, what the config says instead, what becomes of the file
CASES = {
    "as trained": ({}, {}, same),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}}, {}, same),
    "rank_pattern, lost": ({"rank_pattern": {"q_proj": 2}}, {"rank_pattern": {}}, same),
    "rank_pattern, new": ({}, {"rank_pattern": {"q_proj": 2}}, same),
    "rank_pattern, of one layer": ({}, {"rank_pattern": {r".*layers\.0\..*": 2}}, same),
    "rank_pattern, of no layer": ({}, {"rank_pattern": {"layers.0": 2}}, same),
    "rank_pattern, first that matches": (
        {"rank_pattern": {"q_proj": 2}}, {"rank_pattern": {".*_proj": 4, "q_proj": 2}}, same,
    ),
    "rank_pattern, two swapped": (
        {"rank_pattern": {"q_proj": 2, "o_proj": 8}}, {"rank_pattern": {"q_proj": 8, "o_proj": 2}},
        same,
    ),
    "rank_pattern, anchored": ({}, {"rank_pattern": {"^q_proj": 2}}, same),
    "rank_pattern, wrapper": (
        {"target_modules": TOWERS.replace(r"\.linear", ""), "rank_pattern": {r"vision.*q_proj": 2}},
        {}, same,
    ),
    "rank_pattern, wrapper, new": (
        {"target_modules": TOWERS.replace(r"\.linear", "")},
        {"rank_pattern": {r"vision.*q_proj": 2}}, same,
    ),
    "rank_pattern, wrapper, targets inside": (
        {"target_modules": TOWERS}, {"rank_pattern": {r"vision.*q_proj": 2}}, same,
    ),
    "rank of one layer": ({}, {}, rank(2, "layers.1.self_attn.q_proj")),
    "rank of one tensor": ({}, {}, rank(2, "layers.1.self_attn.q_proj.lora_A")),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 2}}, {}, same),
    "alpha_pattern of 0": ({}, {"alpha_pattern": {r".*layers.0.*": 0}}, same),
    "use_rslora": ({"use_rslora": True}, {}, same),
    "trainable tokens": ({"trainable_token_indices": [3, 5]}, {}, same),
    "trainable tokens, by name": ({"trainable_token_indices": {"embed_tokens": [3, 5]}}, {}, same),
    "trainable tokens, too large": (
        {"trainable_token_indices": [3, 5]}, {"trainable_token_indices": [3, 9000]}, same,
    ),
    "trainable tokens, too large, by name": (
        {"trainable_token_indices": [3, 5]},
        {"trainable_token_indices": {"embed_tokens": [3, 512]}}, same,
    ),
    "trainable tokens, negative": (
        {"trainable_token_indices": [3, 5]}, {"trainable_token_indices": [3, -513]}, same,
    ),
    "trainable tokens, more": (
        {"trainable_token_indices": [3, 5]}, {"trainable_token_indices": [3, 5, 7]}, same,
    ),
    "trainable tokens, none named": (
        {"trainable_token_indices": [3, 5]}, {"trainable_token_indices": {"embed": [3, 5]}}, same,
    ),
    "layers_to_transform": (LISTED | {"layers_to_transform": [0, 2]}, {}, same),
    "layers_to_transform, fewer": (LISTED, {"layers_to_transform": [0, 2]}, same),
    "layers_to_transform, one": (
        LISTED, {"layers_to_transform": 1, "layers_pattern": "layers"}, same,
    ),
    "layers_to_transform, none": (LISTED, {"layers_to_transform": [77]}, same),
    "layers_to_transform, and an expression": ({}, {"layers_to_transform": [0, 2]}, same),
    "exclude_modules": ({"exclude_modules": r".*layers\.0\..*"}, {}, same),
    "exclude_modules, more": ({}, {"exclude_modules": ["o_proj"]}, same),
    "exclude_modules, all": ({}, {"exclude_modules": r".*"}, same),
    "layer_replication": ({}, {"layer_replication": [[0, 4], [2, 6]]}, same),
    "modules_to_save": ({"modules_to_save": ["per_layer_projection_norm"]}, {}, same),
    "modules_to_save, another shape": (
        {"modules_to_save": ["per_layer_projection_norm"]}, {},
        replaced("norm.weight", by=lambda t: t[:64].contiguous()),
    ),
    "modules_to_save, more": ({}, {"modules_to_save": ["per_layer_projection_norm"]}, same),
    "lora_bias": ({"lora_bias": True}, {}, same),
    "lora_bias, new": ({}, {"lora_bias": True}, same),
    "lora_bias, another shape": (
        {"lora_bias": True}, {}, replaced("lora_B.bias", by=lambda t: t[:64].contiguous()),
    ),
    "DoRA": ({"use_dora": True}, {}, same),
    "DoRA, rank_pattern, new": ({"use_dora": True}, {"rank_pattern": {"q_proj": 2}}, same),
    "DoRA, another shape": (
        {"use_dora": True}, {},
        replaced("q_proj.lora_magnitude", by=lambda t: t[:64].contiguous()),
    ),
    "r": ({}, {"r": 8}, same),
    "r of 0": ({}, {"r": 0}, same),
    "rank_pattern of 0": ({}, {"rank_pattern": {"q_proj": 0}}, same),
    "lora_alpha": ({}, {"lora_alpha": 0}, same),
}  # fmt: skip


def peft_does(model_dir, folder):
    """ "raises", or how many tensors PEFT loads, ignores and misses."""
    names = list(load((folder / WEIGHTS).read_bytes()))
    try:
        model = peft.PeftModel.from_pretrained(load_model(model_dir), folder)
        result = model.load_adapter(folder, "again")
    except Exception as error:
        return f"raises {type(error).__name__}"
    missing = [name for name in result.missing_keys if ".again" in name]
    ignored = set(result.unexpected_keys)
    return len(names) - len(ignored), len(ignored), len(missing)


def made(model_dir, to, name):
    trained, config, tensors = CASES[name]
    options = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False} | trained
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(load_model(model_dir), peft.LoraConfig(**options))
    model.save_pretrained(to / "trained")
    return changed(to / "trained", to / "given", tensors, **config)


@pytest.mark.parametrize("name", CASES)
def test_verdict_is_what_peft_does(model_dir, tmp_path, name):
    folder = made(model_dir, tmp_path, name)
    does = peft_does(model_dir, folder)
    if does == "raises ValueError" and "and an expression" in name:
        with pytest.raises(InputError, match="PEFT refuses the adapter's config"):
            inspect_adapter(folder, model_dir)
        return
    fit = inspect_adapter(folder, model_dir)
    refused = counts(fit, "refused")
    if isinstance(does, str):
        assert refused, f"PEFT {does}: {fit.verdict} {reasons(fit)}"
        return
    found = (fit.loads, counts(fit, "ignored"), counts(fit, "missing"))
    assert (found, refused) == (does, 0), f"{fit.verdict} {reasons(fit)}"
    assert fit.ok == (does[1:] == (0, 0))


@pytest.mark.parametrize(
    ("config", "silent"),
    [
        ({"alpha_pattern": {r".*layers\.1\..*": 0}}, r"layers\.1\."),
        ({"alpha_pattern": {"q_proj": 0}}, r"q_proj\."),
        ({"alpha_pattern": {"o_proj": 0, ".*_proj": 8}}, r"o_proj\."),
        ({"alpha_pattern": {"layers.1": 0}}, r"^$"),
        ({"lora_alpha": 0, "alpha_pattern": {"q_proj": 8}}, r"^(?!.*q_proj)"),
    ],
    ids=["expression", "name", "first that matches", "no layer", "all but"],
)
def test_alpha_of_0_has_no_effect(model_dir, tmp_path, config, silent):
    folder = changed(made(model_dir, tmp_path, "as trained"), tmp_path / "silent", same, **config)
    fit = inspect_adapter(folder, model_dir)
    model = peft.PeftModel.from_pretrained(load_model(model_dir), folder)
    layers = [n for n, m in model.named_modules() if getattr(m, "lora_A", None)]
    expected = [name for name in layers if model.get_submodule(name).scaling["default"] == 0]
    assert expected == [name for name in layers if re.search(silent, f"{name}.")]
    assert counts(fit, "no effect") == 2 * len(expected)
    assert fit.ok
    assert fit.loads == fit.tensors
    assert ("alpha of 0" in str(fit)) is bool(expected)


PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
#: for experts, by the same columns as above
EXPERTS = {
    "as trained": ({"rank_pattern": {PARAMETERS[0]: 3}}, {}),
    "rank_pattern, lost": ({"rank_pattern": {PARAMETERS[0]: 3}}, {"rank_pattern": {}}),
    "rank_pattern, new": ({}, {"rank_pattern": {PARAMETERS[1]: 3}}),
    "target_parameters, fewer": ({}, {"target_parameters": PARAMETERS[:1]}),
    "layer_replication": ({}, {"layer_replication": [[0, 2], [1, 3]]}),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_verdict_for_experts_is_what_peft_does(moe_dir, tmp_path, name):
    from transformers import Gemma4ForCausalLM

    trained, config = EXPERTS[name]
    options = {"r": 2, "target_modules": ["q_proj"], "target_parameters": PARAMETERS}
    options |= {"init_lora_weights": False, **trained}
    model = Gemma4ForCausalLM.from_pretrained(moe_dir)
    peft.get_peft_model(model, peft.LoraConfig(**options)).save_pretrained(tmp_path / "trained")
    folder = changed(tmp_path / "trained", tmp_path / "given", **config)
    fit = inspect_adapter(folder, moe_dir)
    model = Gemma4ForCausalLM.from_pretrained(moe_dir)
    try:
        peft.PeftModel.from_pretrained(model, folder)
    except (RuntimeError, ValueError):
        assert counts(fit, "refused"), reasons(fit)
        return
    assert fit.ok, reasons(fit)
