"""FSDP2 shards 4-bit weights, and what it gathers are 4-bit weights."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests.engines import EXPERTS, check
from tests.support import linear4bit, run_process


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """Of this process alone."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    store = f"file://{tmp_path_factory.mktemp('store')}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def layer(storage):
    return linear4bit(128, 64, quant_storage=storage, compute_dtype=torch.float32).to("cpu")


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("param_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.regression("fsdp_4bit", "not a Params4bit")
def test_what_is_gathered(storage, param_dtype, mesh):
    from bitsandbytes.nn import Params4bit
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    inputs = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0))
    whole, sharded = layer(storage), layer(storage)
    try:
        expected, packed = whole(inputs.requires_grad_()), whole.weight.detach().clone()
    except RuntimeError as error:
        if "only supports uint8 storage" not in str(error):
            raise
        pytest.skip("this bitsandbytes computes with no other storage on the CPU")
    original = weakref.ref(sharded.weight)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, cast_forward_inputs=False)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    assert isinstance(sharded.weight, DTensor)
    gc.collect()
    assert original() is None, "the whole weight is still in memory"
    for _ in range(2):
        sharded.unshard()
        assert type(sharded.weight) is Params4bit, "not a Params4bit"
        assert torch.equal(sharded.weight.view(torch.uint8), packed.view(torch.uint8))
        sharded.reshard()
        assert torch.equal(sharded(inputs), expected)
    # Without a gradient, some CPUs pack the weight again.
    with torch.no_grad():
        for _ in range(2):
            found = sharded.eval()(inputs.detach())
            assert torch.allclose(found, expected, rtol=0, atol=1e-5 * expected.abs().max())
    assert torch.equal(sharded.train()(inputs), expected)


def test_bitsandbytes_is_imported_after_fsdp():
    """The patch does not import it: neither for programs without it, nor a second time."""
    code = """
import sys
import gemma4_compat
from torch.distributed.fsdp import fully_shard
import accelerate
assert "bitsandbytes" not in sys.modules
import bitsandbytes
assert bitsandbytes.nn.Params4bit
assert str(gemma4_compat.status()["fsdp_4bit"].state) == "applied"
"""
    done = run_process([sys.executable, "-c", code], sys.path)
    assert done.returncode == 0, done.stderr


@pytest.mark.regression("fsdp_4bit", "only Tensors of floating point dtype can require gradients")
def test_shards_that_require_gradients_at_first(mesh, monkeypatch):
    """As in torch 2.11."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor import DTensor

    class Parameter(torch.nn.Parameter):
        def __new__(cls, data, requires_grad=True):
            return torch.nn.Parameter(data, requires_grad or isinstance(data, DTensor))

    whole, sharded = layer(torch.uint8), layer(torch.uint8)
    old = SimpleNamespace(**{**vars(torch.nn), "Parameter": Parameter})
    monkeypatch.setattr(_fsdp_param, "nn", old)
    fully_shard(sharded, mesh=mesh)
    assert isinstance(sharded.weight, DTensor)
    assert not sharded.weight.requires_grad
    with pytest.raises(RuntimeError, match="only Tensors of floating point"):
        sharded.weight.requires_grad_()
    inputs = torch.randn(2, 128)
    assert torch.equal(sharded(inputs), whole(inputs))


def test_other_weights_are_left_alone(mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = torch.nn.Linear(4, 4)
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    module.unshard()
    assert type(module.weight) is torch.nn.Parameter
    assert module.weight.dtype == torch.bfloat16


@pytest.mark.plays("accelerate launch, Accelerator, FSDP2", EXPERTS, "save")
def test_experts_in_two_processes(cell):
    check(cell)
