"""The first forwards of a 4-bit layer on the CPU may run in several threads."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from packaging.version import Version

from tests.support import linear4bit

functional = pytest.importorskip("bitsandbytes.functional")
if not getattr(functional, "has_avx512bf16", bool)():
    pytest.skip("on this CPU nothing is repacked", allow_module_level=True)

from bitsandbytes.nn import modules  # noqa: E402

NESTED = pytest.mark.parametrize("nested", [True, False], ids=["nested", "single"])


def layer(nested):
    return linear4bit(nested=nested).to("cpu").eval()


def run(module):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return module(torch.randn(3, 256, generator=generator).bfloat16())


@pytest.mark.regression("cpu_packing_threads", "thread . is wrong")
@NESTED
def test_first_forwards(nested, monkeypatch):
    """A second thread starts once the first has repacked the quant state, but not the weight."""
    original = modules._convert_weight_packed_for_cpu
    state_changed, second_ended = threading.Event(), threading.Event()

    def pack(*args, **kwargs):
        packed = original(*args, **kwargs)
        state_changed.set()
        second_ended.wait(0.5)  # with the patch, the second waits for this thread
        return packed

    def run_second(module):
        assert state_changed.wait(60)
        try:
            return run(module)
        finally:
            second_ended.set()

    expected = run(layer(nested))
    monkeypatch.setattr(modules, "_convert_weight_packed_for_cpu", pack)
    module = layer(nested)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, module), pool.submit(run_second, module)]
        outputs = [each.result() for each in futures]
    for number, output in enumerate([*outputs, run(module)]):
        assert torch.equal(output, expected), f"thread {number} is wrong"


@NESTED
def test_packed_again_after_training(nested):
    """Unpacking takes the mark away, so the next forward takes the lock again."""
    module = layer(nested)
    expected = run(module)
    assert hasattr(module.weight.quant_state, "_packed_with_weight")
    module.train()(torch.randn(3, 256).bfloat16().requires_grad_())
    assert not hasattr(module.weight.quant_state, "_packed_with_weight")
    assert torch.equal(run(module.eval()), expected)
    assert hasattr(module.weight.quant_state, "_packed_with_weight")


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(again):
    module = layer(True)
    expected = run(module)
    assert torch.equal(run(again(module)), expected)


def test_compiled():
    import bitsandbytes

    if Version(bitsandbytes.__version__) < Version("0.50"):
        pytest.skip("this release cannot compile the forward, with or without the patch")
    module = layer(True)
    torch._dynamo.reset()
    assert torch.equal(run(torch.compile(module, backend="eager")), run(layer(True)))


@pytest.mark.regression("cpu_packing_threads", r"the gradient differs")
def test_an_evaluation_between_forward_and_backward():
    """The graph has the state of its forward, and the weight as it was."""

    def gradient(evaluates):
        layer = linear4bit().to("cpu").train()
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
        output = layer(x.requires_grad_())
        if evaluates:
            with torch.no_grad():
                layer.eval()(x.detach())
        output.sum().backward()
        return x.grad

    assert torch.equal(gradient(True), gradient(False)), "the gradient differs"
