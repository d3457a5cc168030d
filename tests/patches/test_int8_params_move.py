"""Offloaded 8-bit layers work with every release of bitsandbytes."""

from __future__ import annotations

import pytest
import torch

from tests.support import linear8bit_layers


def offloaded(to, folder):
    from accelerate import cpu_offload, disk_offload

    device = torch.device("cpu")
    if to == "disk":
        return disk_offload(linear8bit_layers(), folder, execution_device=device)
    return cpu_offload(linear8bit_layers(), execution_device=device)


@pytest.mark.regression(
    "int8_params_move",
    "Cannot copy out of meta tensor; no data!|'NoneType' object has no attribute 'dtype'",
)
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_same_as_on_one_device(to, tmp_path):
    whole, model = linear8bit_layers(), offloaded(to, tmp_path)
    x = torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        expected = whole(x)
        for _ in range(3):
            assert torch.equal(model(x), expected)


def test_weight_without_scales_moves_to_meta():
    from bitsandbytes.nn import Int8Params

    data = torch.arange(-8, 8, dtype=torch.int8).reshape(4, 4)
    weight = Int8Params(data, requires_grad=False, has_fp16_weights=False)
    moved = weight.to("meta")
    assert moved.is_meta
    assert moved.shape == data.shape


def test_scales_follow():
    layer = linear8bit_layers()[0]
    moved = layer.weight.to("cpu")
    assert torch.equal(moved.CB, layer.weight.data)
    assert torch.equal(moved.SCB, layer.weight.SCB)
