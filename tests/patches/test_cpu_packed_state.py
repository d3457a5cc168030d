"""A 4-bit layer that bitsandbytes has repacked for the CPU is saved and copied correctly."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.support import linear4bit

functional = pytest.importorskip("bitsandbytes.functional")
if not hasattr(functional, "_convert_weight_packed_for_cpu"):
    pytest.skip("this bitsandbytes does not repack", allow_module_level=True)


def layer(nested):
    return linear4bit(nested=nested).to("cpu").eval()


def pack(module):
    """Do what ``Linear4bit.forward`` does on first use, on a CPU with AVX512-BF16."""
    weight = module.weight
    weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(
        weight.data, weight.quant_state
    )
    assert weight.quant_state.packing_format_for_cpu


def contents(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    changed = [k for k in expected if not torch.equal(found[k], expected[k])]
    assert not changed, f"state_dict() after packing changed {', '.join(changed)}"


@pytest.mark.regression("cpu_packed_state", r"state_dict\(\) after packing changed .*absmax")
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "single"])
def test_state_dict_is_that_of_the_checkpoint(nested):
    module = layer(nested)
    expected = contents(module)
    pack(module)
    assert_equal(contents(module), expected)
    assert not getattr(module.weight.quant_state, "packing_format_for_cpu", False)
    assert module.weight.quant_state.nested is nested


@pytest.mark.skipif(not functional.has_avx512bf16(), reason="on this CPU nothing is repacked")
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "single"])
def test_forward_serialize_forward(nested):
    module, x = layer(nested), torch.randn(3, 256, dtype=torch.bfloat16)
    expected = contents(module)
    with torch.no_grad():
        first = module(x)
        for _ in range(2):
            assert_equal(contents(module), expected)
            assert torch.equal(module(x), first)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_packed_layer_survives_copying(duplicate):
    module = layer(True)
    expected = contents(module)
    pack(module)
    assert_equal(contents(duplicate(module)), expected)
    assert_equal(contents(module), expected)


def test_layer_packed_without_the_patch_is_still_unpacked(caplog):
    import gemma4_compat
    from gemma4_compat.patches.avx512_cpu import cpu_packed_state

    cpu_packed_state._warn_approximate.cache_clear()
    layers = [layer(False) for _ in range(2)]
    with gemma4_compat.disabled("cpu_packed_state"):
        weight = layers[0].weight.data.clone()
        absmax = layers[0].weight.quant_state.absmax.clone()
        for module in layers:
            pack(module)
    for module in layers:
        assert torch.equal(module.state_dict()["weight"], weight)
        scales = module.state_dict()["weight.absmax"]  # rounded to bfloat16 by the repacking
        assert scales.dtype == torch.float32
        assert torch.allclose(scales, absmax, rtol=2**-8, atol=0)
    said = [r.getMessage() for r in caplog.records if r.name == cpu_packed_state.__name__]
    assert len(said) == 1
    assert "import gemma4_compat first" in said[0]


@pytest.mark.parametrize("through", [lambda m: m, copy.deepcopy])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "single"])
def test_scales_that_a_user_changed_are_kept(nested, through):
    module = layer(nested)
    expected = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    pack(module)
    module = through(module)
    module.weight.quant_state.absmax.mul_(2)
    contents(module)  # unpacks
    found = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    error = (found.float() - 2 * expected.float()).norm() / expected.float().norm()
    assert error < 2e-2  # absmax was rounded to bfloat16, and quantized again in a nested state
