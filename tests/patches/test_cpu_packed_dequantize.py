"""A 4-bit weight is dequantized correctly after bitsandbytes has repacked it for the CPU."""

from __future__ import annotations

import pytest
import torch

import gemma4_compat
from tests.support import assert_same, linear4bit, load_model, logits

functional = pytest.importorskip("bitsandbytes.functional")
if not hasattr(functional, "_convert_weight_packed_for_cpu"):
    pytest.skip("this bitsandbytes does not repack", allow_module_level=True)

repacks = pytest.mark.skipif(
    not functional.has_avx512bf16(), reason="on this CPU nothing is repacked"
)
WRONG = r"differ"


def layer(nested, storage=torch.uint8):
    module = linear4bit(nested=nested, compute_dtype=None, quant_storage=storage)
    return module.to("cpu").eval()


def dequantized(module):
    return functional.dequantize_4bit(module.weight.data, module.weight.quant_state)


@pytest.mark.regression("cpu_packed_dequantize", WRONG)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "single"])
def test_dequantized_values(nested, storage):
    module = layer(nested, storage)
    expected = dequantized(module)
    weight = module.weight
    weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(
        weight.data, weight.quant_state
    )
    packed, state = weight.data.clone(), dict(vars(weight.quant_state))
    for _ in range(2):
        assert torch.equal(dequantized(module), expected), "dequantized values differ"
    assert torch.equal(weight.data, packed)
    assert vars(weight.quant_state).keys() == state.keys()
    assert all(vars(weight.quant_state)[key] is value for key, value in state.items())


@repacks
@pytest.mark.regression("cpu_packed_dequantize", WRONG)
def test_merge_after_a_forward(model_dir, language_adapter_dir):
    from peft import PeftModel

    def merged(*, run_before):
        model = PeftModel.from_pretrained(load_model(model_dir, "nf4"), language_adapter_dir)
        if run_before:
            logits(model.eval(), ["text"])
        return logits(model.merge_and_unload().eval())

    assert_same(merged(run_before=True), merged(run_before=False))


@repacks
@pytest.mark.regression("cpu_packed_dequantize", WRONG)
def test_dequantize_after_a_forward(model_dir):
    expected = load_model(model_dir, "nf4-nested")
    expected.dequantize()
    model = load_model(model_dir, "nf4-nested")
    logits(model)
    model.dequantize()
    assert_same(logits(model), logits(expected))


@repacks
@pytest.mark.regression("cpu_packed_dequantize", WRONG)
def test_dora(model_dir, monkeypatch):
    """DoRA reads the base weight in every forward, after the base layer has repacked it."""
    from peft import LoraConfig, get_peft_model

    targets = r".*\.language_model\..*\.mlp\.(up|down)_proj"

    def found():
        model = load_model(model_dir, "nf4")
        config = LoraConfig(target_modules=targets, use_dora=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = get_peft_model(model, config)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.05)
        return logits(model.eval(), ["text"])["text"]

    packed = found()
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    never_packed = found()
    # The two kernels round differently: without DoRA, the difference is 0.02 as well.
    relative = ((packed - never_packed).norm() / never_packed.norm()).item()
    assert relative <= 0.05, f"logits differ by {relative:.2g}, relatively"


def test_without_the_other_patch():
    """Without cpu_packed_state, packing rounds the scales to bfloat16: unpacking is approximate."""
    module = layer(False)
    expected = dequantized(module)
    with gemma4_compat.disabled("cpu_packed_state"):
        weight = module.weight
        weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(
            weight.data, weight.quant_state
        )
        found = dequantized(module)
    assert torch.allclose(found.float(), expected.float(), rtol=2**-7)
