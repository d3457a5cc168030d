"""Hooks cost little if the inputs of their module are on the execution device already."""

from __future__ import annotations

import sys
from copy import deepcopy as copy_of

import pytest
import torch
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from torch import nn

import gemma4_compat
from tests.support import assert_same, load_model, logits, split

CPU = torch.device("cpu")


def calls(action):
    """The number of calls of Python functions in ``action``."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.regression("split_model_overhead", r"Python calls for a hooked layer")
def test_calls_of_a_hooked_layer():
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    alone = calls(lambda: layer(x))
    add_hook_to_module(layer, AlignDevicesHook(execution_device=CPU))
    layer(x)
    hooked = calls(lambda: layer(x)) - alone
    # the function that checks the hook and the inputs, and the functions that it calls
    assert hooked <= 5, f"{hooked} Python calls for a hooked layer"


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        return args, kwargs


class Opaque:
    """An object with the method ``to``, like the batch of a tokenizer."""

    def __init__(self, device="cpu"):
        self.device = device

    def to(self, device, **_):
        return Opaque(str(device))


def hooked(device, **options):
    module = Echo()
    add_hook_to_module(module, AlignDevicesHook(execution_device=device, **options))
    return module


VALUES = {
    "tensors": (torch.ones(2), torch.ones(1, dtype=torch.long)),
    "plain": (None, True, 3, 0.5, "a"),
    "tuple": ((torch.ones(2), (torch.ones(1), None)),),
    "list": ([torch.ones(2)],),
    "dict": ({"a": torch.ones(2)},),
    "object": (Opaque(),),
    "nothing": (),
}


def devices(value):
    if isinstance(value, (tuple, list)):
        return [type(value), *map(devices, value)]
    if isinstance(value, dict):
        return {key: devices(each) for key, each in value.items()}
    return str(getattr(value, "device", value))


@pytest.mark.parametrize("device", [CPU, "cpu", torch.device("meta"), "meta"], ids=str)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_inputs_arrive_as_they_would(pristine, device, values):
    named = {f"n{i}": value for i, value in enumerate(values)}
    found = devices(hooked(device)(*values, **named))
    gemma4_compat.uninstall("split_model_overhead")
    assert devices(hooked(device)(*values, **named)) == found


def test_a_list_is_still_a_copy():
    given = [torch.ones(1)]
    (received,), _ = hooked(CPU)(given)
    assert received is not given
    assert received[0] is given[0]


def test_skipped_keys():
    module = hooked(torch.device("meta"), skip_keys="kept")
    (moved,), named = module(torch.ones(1), kept=torch.ones(1), other=torch.ones(1))
    assert moved.is_meta
    assert {name: value.device.type for name, value in named.items()} == {
        "kept": "cpu",
        "other": "meta",
    }


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_split_model(model_dir, tmp_path, kind):
    expected = logits(load_model(model_dir, kind))
    model = split(load_model(model_dir, kind), tmp_path)
    for _ in range(2):
        assert_same(logits(model), expected)


def test_a_hook_that_is_joined_or_removed():
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    expected = layer(x)
    add_hook_to_module(layer, AlignDevicesHook(execution_device=CPU))

    class Double(ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    add_hook_to_module(layer, Double(), append=True)
    assert torch.equal(layer(x), 2 * expected)
    remove_hook_from_module(layer)
    assert torch.equal(layer(x), expected)
    assert layer.forward.__func__ is nn.Linear.forward


def test_a_copy_computes_with_its_own_weights():
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    add_hook_to_module(layer, AlignDevicesHook(execution_device=CPU))
    expected, copy = layer(x), copy_of(layer)
    with torch.no_grad():
        copy.weight.zero_()
    assert torch.equal(layer(x), expected)
    assert torch.equal(copy(x), copy.bias.expand(1, 4))


def test_compiled():
    layer = nn.Linear(4, 4)
    x = torch.ones(1, 4)
    expected = layer(x)
    add_hook_to_module(layer, AlignDevicesHook(execution_device=CPU))
    assert torch.equal(torch.compile(layer, backend="eager")(x), expected)
    remove_hook_from_module(layer)


def test_the_execution_device_may_change():
    module = hooked(CPU)
    module(torch.ones(1))
    module._hf_hook.execution_device = torch.device("meta")
    (received,), _ = module(torch.ones(1))
    assert received.is_meta


def test_replaced_methods_of_hooks_are_called(monkeypatch):
    """A method may be replaced on one hook or on the class."""
    seen = []
    module = hooked(CPU)
    original = module._hf_hook.pre_forward

    def of_one(*args, **kwargs):
        seen.append("one")
        return original(*args, **kwargs)

    module._hf_hook.pre_forward = of_one
    module(torch.ones(1))
    assert seen == ["one"]
    other = hooked(CPU)
    other(torch.ones(1))
    of_all = AlignDevicesHook.post_forward

    def post_forward(self, *args, **kwargs):
        seen.append("all")
        return of_all(self, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "post_forward", post_forward)
    other(torch.ones(1))
    assert seen == ["one", "all"]
    monkeypatch.undo()
    other(torch.ones(1))
    assert seen == ["one", "all"]
