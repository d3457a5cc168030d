"""In a step, functions of this package run in place of the forwards of some modules."""

from __future__ import annotations

import threading

import pytest
import torch

from gemma4_compat.runtime.kernels.step import in_step


def forwards(model):
    """All attributes that can be a forward, by module."""
    return {
        name: {k: v for k, v in vars(module).items() if k in ("forward", "_old_forward")}
        for name, module in model.named_modules()
    }


@pytest.fixture
def model():
    """A linear layer alone, one with accelerate's hook, and one that other code replaced."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    names = ("plain", "hooked", "replaced")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in names})
    add_hook_to_module(model["hooked"], AlignDevicesHook(execution_device="cpu"))
    model["replaced"].forward = lambda x: x + 1
    return model


def step(model, seen=None):
    def call(usual, *args, **kwargs):
        if seen is not None:
            seen.append(threading.get_ident())
        return usual(*args, **kwargs)

    return in_step([(module, call) for module in model.values()])


def test_forwards_are_replaced_in_the_context_only(model):
    before = forwards(model)
    with step(model):
        changed = {name for name, own in forwards(model).items() if own != before[name]}
    assert changed == {"plain", "hooked"}
    assert forwards(model) == before
    with pytest.raises(TypeError), step(model):
        model["plain"]()
    assert forwards(model) == before


def test_forwards_that_other_code_replaces_in_the_context(model):
    def own(x):
        return x

    with step(model):
        model["plain"].forward = own
    assert model["plain"].forward is own


def test_outputs(model):
    inputs, seen = torch.randn(2, 8), []
    expected = {name: module(inputs) for name, module in model.items()}
    with step(model, seen):
        for name, module in model.items():
            assert torch.equal(module(inputs), expected[name])
            with pytest.raises(TypeError):
                module(inputs, inputs)
    assert len(seen) == 4  # two calls of two modules


def test_other_threads_run_the_modules_as_usual(model):
    inputs, seen, found = torch.randn(2, 8), [], []
    expected = model["plain"](inputs)
    with step(model, seen):
        model["plain"](inputs)
        thread = threading.Thread(target=lambda: found.append(model["plain"](inputs)))
        thread.start()
        thread.join()
    assert seen == [threading.get_ident()]
    assert torch.equal(found[0], expected)
