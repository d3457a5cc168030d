"""A replacement of what a variable of a closure holds."""

from __future__ import annotations

import gc
import importlib
import inspect
import itertools
from functools import wraps

import pytest

from gemma4_compat.engine import Patch

from .conftest import ALWAYS, snapshot, tagging

SOURCE = """
from functools import wraps

def checkpointing(cls):
    forward = cls.forward

    @wraps(forward)
    def outermost(self, x):
        mark = "" if type(self).forward is outermost else "lost "
        return mark + forward(self, x)

    cls.forward = outermost
    return cls

@checkpointing
class Layer:
    def forward(self, x):
        return x

class Plain:
    def forward(self, x):
        return x
"""


@pytest.fixture
def layers(lib):
    lib.write("layers", SOURCE)
    return lib


def patch_of(lib, name, variable="forward", attribute="Layer.forward"):
    patch = Patch(name, symptom="", affects=ALWAYS)
    patch.replaces(f"{lib.name}.layers", attribute, variable=variable)(tagging(name))
    return patch


def inner(function):
    return inspect.getclosurevars(function).nonlocals["forward"]


@pytest.mark.parametrize("late", [False, True])
def test_put_and_undone(layers, make, late):
    module = layers.load("layers") if late else None
    engine = make(patch_of(layers, "p"))
    module = module or layers.load("layers")
    forward, instance = module.Layer.forward, module.Layer()
    usual, before = inspect.unwrap(forward), snapshot(module, module.Layer)
    keeps = instance.forward  # as accelerate's hooks do
    assert engine.status()["p"].reason == ""
    assert (instance.forward("x"), keeps("x")) == ("p>x", "p>x")
    assert module.Layer.forward is forward
    engine.uninstall()
    assert (instance.forward("x"), keeps("x")) == ("x", "x")
    assert inner(forward) is usual
    assert engine.install()["p"].reason == ""
    assert instance.forward("x") == "p>x"
    engine.uninstall()
    assert snapshot(module, module.Layer) == before


@pytest.mark.parametrize("order", [*itertools.permutations("pqr")], ids="".join)
@pytest.mark.parametrize("back", [*itertools.permutations("pqr")], ids="".join)
def test_any_order(layers, make, order, back):
    """``p`` and ``q`` are for the variable, ``r`` for the attribute."""
    module = layers.load("layers")
    forward, usual = module.Layer.forward, inspect.unwrap(module.Layer.forward)
    patches = (patch_of(layers, "p"), patch_of(layers, "q"), patch_of(layers, "r", ""))
    engine = make(*patches, install=False)
    for name in order:
        engine.install(name)
    assert module.Layer().forward("x") == "r>lost q>p>x"
    rest = {*"pqr"}
    for name in back:
        engine.uninstall(name)
        rest.remove(name)
        tags = [f"{each}>" for each in "qp" if each in rest]
        assert module.Layer().forward("x") == f"{'r>lost ' * ('r' in rest)}{''.join(tags)}x"
    assert module.Layer.forward is forward
    assert inner(forward) is usual
    gc.collect()
    assert [each.held for each in engine.status()] == [0, 0, 0]


def test_references_to_the_original(layers, make):
    module = layers.load("layers")
    kept = [inspect.unwrap(module.Layer.forward)]
    engine = make(patch_of(layers, "p"))
    assert engine.status()["p"].held == 1
    kept.clear()
    engine.uninstall()
    assert engine.install("p")["p"].held == 0


def test_a_function_without_the_variable(layers, make):
    """It is replaced itself, unless it refers to itself."""
    engine = make(
        patch_of(layers, "p", attribute="Plain.forward"),
        patch_of(layers, "q", "another"),
        patch_of(layers, "r", "outermost", "Plain.forward"),
    )
    module = layers.load("layers")
    status = engine.status()
    assert [each.state for each in status] == ["applied", "drifted", "applied"]
    assert "refers to itself, and has no variable another" in status["q"].reason
    assert module.Plain().forward("x") == "r>p>x"
    assert module.Layer().forward("x") == "x"


def test_other_code_around_the_attribute(layers, make, monkeypatch):
    """It can be removed below a user's wrapper, and be put there again."""
    engine = make(patch_of(layers, "p"))
    module = layers.load("layers")
    usual = module.Layer.forward

    @wraps(usual)
    def mine(self, x):
        return f"mine>{usual(self, x)}"

    monkeypatch.setattr(module.Layer, "forward", mine)
    assert module.Layer().forward("x") == "mine>lost p>x"
    engine.uninstall()
    assert engine.status()["p"].state == "disabled"
    assert module.Layer().forward("x") == "mine>lost x"


def test_other_code_in_the_cell(layers, make):
    """The patch stays until that is undone."""
    engine = make(patch_of(layers, "p"))
    module = layers.load("layers")
    [cell] = [
        c
        for c in module.Layer.forward.__closure__
        if c.cell_contents is inner(module.Layer.forward)
    ]
    ours = cell.cell_contents
    cell.cell_contents = lambda self, x: f"mine>{ours(self, x)}"
    engine.uninstall()
    assert module.Layer().forward("x") == "mine>p>x"
    cell.cell_contents = ours
    engine.uninstall()
    assert module.Layer().forward("x") == "x"


def test_a_reload(layers, make):
    engine = make(patch_of(layers, "p"))
    old = layers.load("layers").Layer
    module = importlib.reload(layers.load("layers"))
    assert (old().forward("x"), module.Layer().forward("x")) == ("p>x", "x")
    name = f"{layers.name}.layers.Layer.forward"
    assert engine.status()["p"].reason == f"other code changed {name} afterwards"


def test_a_factory_that_fails(layers, make):
    """Nothing is changed."""
    patch = patch_of(layers, "p")
    patch.replaces(f"{layers.name}.layers", "Plain.forward")(lambda original: None)
    engine = make(patch)
    module = layers.load("layers")
    assert engine.status()["p"].state == "failed"
    assert module.Layer().forward("x") == "x"
    assert inner(module.Layer.forward) is inspect.unwrap(module.Layer.forward)
