"""A warning says that load_in_8bit does not quantize the experts of Gemma 4."""

from __future__ import annotations

import logging
import re

import pytest
import torch

import gemma4_compat
from gemma4_compat.tiny import text_inputs
from tests.support import load_model, quantization

OURS = "gemma4_compat.patches.offloading.fused_experts_notice"
LAYERS = 3
NOTICE = re.compile(
    r"load_in_8bit does not quantize the experts of (?P<layers>\d+) layers "
    r"\(fused tensors such as (?P<name>[\w.]+)\): "
    r"they are loaded in (?P<dtype>\w+) and take (?P<size>[\d.e+-]+) GiB\.  "
    r"load_in_4bit quantizes them\.  "
    r"To find a device map that fits your GPU, run gemma4-compat plan MODEL --gpu SIZE\."
)


def load(path, kind=None, dtype=torch.bfloat16):
    from transformers import AutoModelForCausalLM

    options = {} if kind is None else {"quantization_config": quantization(kind)}
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, device_map={"": "cpu"}, **options
    ).eval()


@pytest.fixture
def notices(caplog):
    def run(function, *args, **kwargs):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=OURS):
            result = function(*args, **kwargs)
        return result, [r.getMessage() for r in caplog.records if r.name == OURS]

    return run


def fused(model):
    return {name: p for name, p in model.named_parameters() if ".experts." in name}


def logits(model):
    from types import SimpleNamespace

    inputs = text_inputs(SimpleNamespace(text_config=model.config, image_token_id=-1))
    inputs.pop("mm_token_type_ids")
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.regression("fused_experts_notice", r"no warning that the experts are not quantized")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, "auto"], ids=str)
def test_the_notice_is_true(moe_dir, dtype, notices):
    model, said = notices(load, moe_dir, "int8", dtype)
    assert said, "no warning that the experts are not quantized"
    (said,) = (NOTICE.fullmatch(message) for message in said)
    linears = {type(layer.mlp.up_proj).__name__ for layer in model.model.layers}
    assert linears == {"Linear8bitLt"}

    experts = fused(model)
    assert len(experts) == 2 * LAYERS
    assert int(said["layers"]) == LAYERS
    assert said["name"] in experts
    assert {p.dtype for p in experts.values()} == {getattr(torch, said["dtype"])}
    size = sum(p.untyped_storage().nbytes() for p in experts.values())
    assert float(said["size"]) == pytest.approx(size / 2**30, rel=5e-3)  # rounded to three digits


def test_nothing_else_changes(moe_dir, notices):
    model, said = notices(load, moe_dir, "int8")
    assert len(said) == 1
    with gemma4_compat.disabled("fused_experts_notice"):
        expected, said = notices(load, moe_dir, "int8")
    assert said == []
    assert type(model.model.layers[0].experts) is type(expected.model.layers[0].experts)
    assert logits(model).isfinite().all()
    assert torch.equal(logits(model), logits(expected))


def test_quantized_checkpoint(moe_dir, tmp_path, notices, eight_bit_files):
    """When an 8-bit model is saved and loaded again, its experts are still in bfloat16."""
    model, (first,) = notices(load, moe_dir, "int8")
    model.save_pretrained(tmp_path)
    again, (second,) = notices(load, tmp_path)
    assert type(again.model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
    assert {p.dtype for p in fused(again).values()} == {torch.bfloat16}
    assert first == second


def test_not_quantized(moe_dir, notices):
    _, said = notices(load, moe_dir)
    assert said == []


def test_four_bits(moe_dir, notices):
    """load_in_4bit quantizes them."""
    model, said = notices(load, moe_dir, "nf4")
    assert said == []
    assert {p.dtype for p in fused(model).values()} == {torch.uint8}


def test_no_experts(model_dir, notices):
    _, said = notices(load_model, model_dir, "int8")
    assert said == []


def test_other_models(tmp_path, notices):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, num_local_experts=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    model, said = notices(load, tmp_path, "int8")
    assert any(p.dim() == 3 for p in model.parameters()), "the same symptom, another model"
    assert said == []
