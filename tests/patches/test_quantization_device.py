"""In a block of quantize_on, another device quantizes the weights of a model on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch

import gemma4_compat
from gemma4_compat.runtime.experts.packed import packed_parameters
from tests import support
from tests.support import assert_same, load_model, logits, with_layers_on_the_cpu


def quantized(values=None):
    from bitsandbytes.nn import Params4bit

    values = torch.ones(64, 64) if values is None else values
    # bitsandbytes keeps one table of nested quantization, which must not be on meta.
    options = {"compress_statistics": False, "quant_type": "nf4"}
    return Params4bit(values, requires_grad=False, **options).to("cpu")


@pytest.mark.regression("quantization_device", r"the CPU quantized the weight")
def test_the_other_device_quantizes():
    """The device "meta" computes nothing, so it has no result."""
    with gemma4_compat.quantize_on("meta"):
        try:
            quantized()
        except RuntimeError:  # it has no values
            pass
        else:
            pytest.fail("the CPU quantized the weight")


def test_only_in_the_block_and_its_thread():
    with gemma4_compat.quantize_on("meta"):
        other = threading.Thread(target=lambda: made.append(quantized()))
        made = []
        other.start()
        other.join()
    made.append(quantized())
    assert [weight.device.type for weight in made] == ["cpu", "cpu"]


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_the_same_device(model_dir, kind):
    """The CPU as the device that quantizes: nothing differs from a load without the block."""
    with gemma4_compat.quantize_on("cpu"):
        model = load_model(model_dir, kind)
    assert_same(logits(model), logits(load_model(model_dir, kind)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda:0")], ids=repr)
def test_without_a_gpu_the_cpu_quantizes(device):
    with gemma4_compat.quantize_on(device):
        weight = quantized()
    assert weight.device.type == "cpu"


def same_weights(one, other):
    states, expected = one.state_dict(), other.state_dict()
    assert states.keys() == expected.keys()
    for name, tensor in states.items():
        assert torch.equal(tensor.cpu(), expected[name].cpu()), name


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_weights_of_a_model_on_the_gpu(model_dir, kind):
    """Bit for bit, and so is the model of which layers are offloaded then."""
    whole = load_model(model_dir, kind, {"": 0})
    with gemma4_compat.quantize_on(0):
        model = load_model(model_dir, kind)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    same_weights(model, whole)
    assert_same(logits(with_layers_on_the_cpu(model)), logits(whole))


@pytest.mark.cuda
def test_experts_one_weight_at_a_time(tmp_path):
    from transformers import AutoModelForCausalLM

    support.save_random("Gemma4 experts", tmp_path)
    options = {
        "dtype": torch.bfloat16,
        "quantization_config": support.quantization(
            "nf4-nested", llm_int8_skip_modules=support.NOT_PACKED
        ),
    }
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": 0}, **options)
    largest = 0
    for module in whole.modules():
        for parameter in packed_parameters(module).values():
            largest = max(largest, 4 * parameter.numel())  # in bfloat16, of 4 bits
    assert largest
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    with gemma4_compat.quantize_on(0):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, **options)
    assert torch.cuda.memory_allocated(0) <= before + 2**16
    assert torch.cuda.max_memory_allocated(0) - before <= 2.5 * largest
    same_weights(model, whole)


@pytest.mark.cuda
def test_without_memory_the_cpu_quantizes(caplog):
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    free = max((each["size"] for each in blocks if each["state"] == "inactive"), default=0)
    values = torch.ones(max(2**20, free), dtype=torch.bfloat16)  # twice the largest free block
    torch.cuda.set_per_process_memory_fraction(2**20 / whole)
    try:
        with gemma4_compat.quantize_on(0):
            weight = quantized(values)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert weight.device.type == "cpu"
    assert "quantized on the CPU" in caplog.text
    assert torch.equal(weight, quantized(values))
