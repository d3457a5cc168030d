"""Offloaded 8-bit layers are trained, and leave the GPU after their forward."""

from __future__ import annotations

import gc

import pytest
import torch

import gemma4_compat
from tests.support import assert_same, linear8bit_layers, load_model, logits, with_layers_on_the_cpu


def offloaded():
    from accelerate import cpu_offload

    return cpu_offload(linear8bit_layers(), execution_device=torch.device("cpu"))


def output_and_gradient(model):
    torch.manual_seed(1)
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    y = model(x)
    y.sum().backward()
    return y.detach(), x.grad


@pytest.mark.regression(
    "int8_offload_state",
    "has no attribute 'unsqueeze'|State must contain CB matrix for backward",
)
def test_gradients():
    whole, model = linear8bit_layers(), offloaded()
    for _ in range(2):
        found, expected = output_and_gradient(model), output_and_gradient(whole)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.regression("int8_offload_state", "layers still have their weights")
def test_weights_are_dropped():
    whole, model = linear8bit_layers(), offloaded()
    x = torch.randn(3, 64).bfloat16()
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(x), whole(x))
        held = sum(layer.state.CB is not None for layer in model)
        assert not held, f"{held} layers still have their weights"


@pytest.mark.cuda
@pytest.mark.usefixtures("offloaded_eight_bit")
def test_gpu_memory_is_freed(model_dir):
    expected = logits(load_model(model_dir, "int8", {"": 0}))
    gemma4_compat.limit_page_locked(0)  # accelerate copies the layers
    try:
        model = with_layers_on_the_cpu(load_model(model_dir, "int8", {"": 0}))
        gc.collect()
        layers = [m for m in model.modules() if hasattr(m, "state") and m.weight.is_meta]
        weights = sum(layer.weight.nbytes for layer in layers)
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            assert_same(logits(model), expected)
        gc.collect()
        # The numbers of the outlier columns stay.
        assert torch.cuda.memory_allocated() - before < weights / 10, "weights stay on the GPU"
    finally:
        gemma4_compat.limit_page_locked(None)
