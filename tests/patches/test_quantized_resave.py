"""A model from a quantized checkpoint can be saved and loaded again."""

from __future__ import annotations

import pytest
import torch

from tests.patches.test_offloaded_save import assert_same_files
from tests.support import assert_same, load_model, logits, split

FOUR_BIT = ["nf4", "nf4-nested"]


def from_quantized(folder, model_class="Gemma4ForConditionalGeneration"):
    """Load a quantized checkpoint; its config contains the quantization config."""
    import transformers

    found = getattr(transformers, model_class).from_pretrained(
        folder, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    kinds = {type(module).__name__ for module in found.modules()}
    assert {"Linear4bit", "Linear8bitLt"} & kinds
    return found.eval()


def checkpoint(model_dir, kind, folder):
    """Save a quantized checkpoint, and return the logits of its model."""
    model = load_model(model_dir, kind)
    model.save_pretrained(folder)
    return logits(model)


def assert_resaved(model_dir, kind, folder):
    expected = checkpoint(model_dir, kind, folder / "first")
    again = from_quantized(folder / "first")
    again.save_pretrained(folder / "second")
    assert_same_files(folder / "second", folder / "first")
    assert_same(logits(from_quantized(folder / "second")), expected)
    assert_same(logits(again), expected)


@pytest.mark.regression("quantized_resave", "NotImplementedError")
@pytest.mark.parametrize("kind", FOUR_BIT)
def test_four_bit(model_dir, tmp_path, kind):
    assert_resaved(model_dir, kind, tmp_path)


@pytest.mark.usefixtures("eight_bit_files")
@pytest.mark.regression("quantized_resave", "NotImplementedError")
def test_eight_bit(model_dir, tmp_path):
    assert_resaved(model_dir, "int8", tmp_path)


@pytest.mark.regression(
    "quantized_resave", "could not revert some weight conversions", behind="quant_state_offload"
)
def test_split(model_dir, tmp_path):
    expected = checkpoint(model_dir, "nf4-nested", tmp_path / "first")
    model = split(from_quantized(tmp_path / "first"), tmp_path / "offload")
    assert model.model.vision_tower.encoder.layers[0].self_attn.q_proj.linear.weight.is_meta
    model.save_pretrained(tmp_path / "second")
    assert_same_files(tmp_path / "second", tmp_path / "first")
    assert_same(logits(from_quantized(tmp_path / "second")), expected)


@pytest.mark.regression("quantized_resave", "NotImplementedError")
def test_another_model_with_conversions_of_its_own(tmp_path):
    """transformers merges the experts of Mixtral on loading, and splits them on saving."""
    from safetensors.torch import load_file
    from transformers import BitsAndBytesConfig, MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    model = MixtralForCausalLM.from_pretrained(
        tmp_path / "whole",
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        device_map={"": "cpu"},
        dtype=torch.bfloat16,
    )
    model.save_pretrained(tmp_path / "first")
    again = from_quantized(tmp_path / "first", "MixtralForCausalLM")
    again.save_pretrained(tmp_path / "second")
    assert_same_files(tmp_path / "second", tmp_path / "first")
    names = load_file(tmp_path / "second" / "model.safetensors")
    assert any(".experts.0." in name for name in names)


def test_unquantized(model_dir, tmp_path):
    load_model(model_dir).save_pretrained(tmp_path / "first")
    load_model(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert_same_files(tmp_path / "second", tmp_path / "first")
