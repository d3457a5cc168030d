"""dispatch_model frees the GPU memory of the weights that it offloads."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def test_host_tensors_are_kept_as_they_are():
    from accelerate.utils import OffloadedWeightsLoader

    given = {"a": torch.ones(2), "b": torch.ones(2, device="meta")}
    assert OffloadedWeightsLoader(state_dict=given).state_dict is given
    assert OffloadedWeightsLoader(given)["a"] is given["a"]
    with pytest.raises(ValueError, match="Need either"):
        OffloadedWeightsLoader()


@pytest.mark.cuda
@pytest.mark.regression("offload_device_copy", r"GPU memory is not freed")
@pytest.mark.parametrize("kind", ["bf16", "nf4"])
def test_dispatching_from_the_gpu_frees_it(kind):
    import bitsandbytes as bnb
    from accelerate import dispatch_model

    torch.manual_seed(0)
    if kind == "bf16":
        layers = [nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(4)]
    else:
        options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4"}
        layers = [bnb.nn.Linear4bit(1024, 1024, bias=False, **options) for _ in range(4)]
    model = nn.Sequential(*layers).to(0)
    x = torch.randn(2, 1024, dtype=torch.bfloat16, device=0)
    with torch.no_grad():
        expected = model(x)
        before = torch.cuda.memory_allocated(0)
        size = sum(p.numel() * p.element_size() for p in layers[1].parameters())
        model = dispatch_model(model, {"0": 0, "1": "cpu", "2": "cpu", "3": 0})
        freed = before - torch.cuda.memory_allocated(0)
        assert freed >= 2 * size, f"GPU memory is not freed: {freed} of {2 * size} bytes"
        for _ in range(2):
            assert torch.equal(model(x), expected)


@pytest.mark.cuda
def test_tied_weights_stay_one_tensor():
    from accelerate.utils import OffloadedWeightsLoader

    weight = nn.Parameter(torch.randn(4, 4, device=0))
    loader = OffloadedWeightsLoader({"a": weight, "b": weight, "c": weight[0]})
    assert loader["a"] is loader["b"]
    assert loader["c"].shape == (4,)
    assert torch.equal(loader["a"], weight.cpu())
