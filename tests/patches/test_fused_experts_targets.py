"""A warning says that adapters on the MLP of Gemma 4 do not include the experts."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from gemma4_compat.inspection import inspect_adapter, scan_targets

peft = pytest.importorskip("peft")

OURS = "gemma4_compat.patches.adapters.fused_experts_targets"
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.down_proj", "experts.gate_up_proj"]


def load(path):
    from transformers import Gemma4ForCausalLM

    return Gemma4ForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def told(caplog, function, *args, **kwargs):
    """Call the function; return the warnings of the patch and the function's result."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        result = function(*args, **kwargs)
    return [r.getMessage() for r in caplog.records if r.name == OURS], result


def trained_experts(model):
    return {n for n, p in model.named_parameters() if ".experts." in n and p.requires_grad}


@pytest.mark.regression("fused_experts_targets", "nothing says that the experts get no adapter")
@pytest.mark.parametrize("targets", [MLP, "all-linear"])
def test_experts_are_missed(moe_dir, caplog, targets):
    config = peft.LoraConfig(r=4, target_modules=targets)
    messages, model = told(caplog, peft.get_peft_model, load(moe_dir), config)
    assert not trained_experts(model)
    assert messages, "nothing says that the experts get no adapter"
    (message,) = messages
    assert "none of the experts of 3 layers" in message
    assert f"target_parameters={EXPERTS}" in message


def test_what_is_advised_reaches_all_experts(moe_dir, caplog):
    config = peft.LoraConfig(r=4, target_modules=MLP, target_parameters=EXPERTS)
    messages, model = told(caplog, peft.get_peft_model, load(moe_dir), config)
    assert messages == []
    reached = {re.sub(r"(\.base_layer)*\.lora_[AB].*", "", name) for name in trained_experts(model)}
    assert reached == {f"base_model.model.model.layers.{layer}.experts" for layer in range(3)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = dict(load(moe_dir).named_parameters())
    merged = dict(model.merge_and_unload().named_parameters())
    for layer in range(3):
        for parameter in EXPERTS:
            name = f"model.layers.{layer}.{parameter}"
            changed = (merged[name] != before[name]).flatten(1).any(1)
            assert changed.all(), name


@pytest.mark.parametrize("one", EXPERTS)
def test_one_of_two(moe_dir, caplog, one):
    config = peft.LoraConfig(r=4, target_modules=MLP, target_parameters=[one])
    (message,), _ = told(caplog, peft.get_peft_model, load(moe_dir), config)
    (other,) = set(EXPERTS) - {one}
    assert f"target_parameters=['{other}']" in message


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], r".*self_attn\.o_proj"])
def test_attention_alone(moe_dir, caplog, targets):
    config = peft.LoraConfig(r=4, target_modules=targets)
    messages, _ = told(caplog, peft.get_peft_model, load(moe_dir), config)
    assert messages == []


def test_loading(moe_dir, caplog, tmp_path):
    peft.get_peft_model(load(moe_dir), peft.LoraConfig(r=4, target_modules=MLP)).save_pretrained(
        tmp_path
    )
    messages, model = told(caplog, peft.PeftModel.from_pretrained, load(moe_dir), tmp_path)
    assert len(messages) == 1
    attention = peft.LoraConfig(r=4, target_modules=["q_proj"])
    messages, _ = told(caplog, model.add_adapter, "attention", attention)
    assert messages == []


def test_dense_model(model_dir, caplog):
    from tests.support import load_model

    config = peft.LoraConfig(r=4, target_modules=r".*language_model.*\.(gate|up|down)_proj")
    messages, _ = told(caplog, peft.get_peft_model, load_model(model_dir), config)
    assert messages == []


def test_scan(moe_dir):
    for targets in (MLP, "all-linear"):
        (note,) = scan_targets(moe_dir, targets).notes
        assert "the experts of 3 layers get no adapter" in note
        assert f"target_parameters={EXPERTS}" in note
    assert scan_targets(moe_dir, ["q_proj"]).notes == ()


def test_inspection_says_nothing(moe_dir, tmp_path, caplog):
    """PEFT then creates the adapter on a model without weights."""
    config = peft.LoraConfig(r=4, target_modules=MLP)
    peft.get_peft_model(load(moe_dir), config).save_pretrained(tmp_path)
    messages, found = told(caplog, inspect_adapter, tmp_path, moe_dir)
    assert (messages, found.ok) == ([], True)
