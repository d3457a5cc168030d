"""A replacement that does not call what it replaces is compared with it, or knows its code.

A patch that makes code faster or smaller compares its result with the original's on the user's
machine, or names the code that it copies (``copies``), or is for released versions only.  A patch
that fixes code names what it copies.  Patches that do neither are in ``WHY``, each with its reason.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap

import pytest
from packaging.requirements import Requirement

from gemma4_compat.engine import Kind
from gemma4_compat.patches import load
from gemma4_compat.versions import LIBRARIES

PATCHES = {patch.name: patch for patch in load()}
#: Where it is compared before its first use, or asks for the code: module, function.
COMPARED = {
    "fused_experts_4bit": ("patches.offloading.fused_experts_4bit", "experts_forward"),
    "grouped_query_attention": ("patches.attention.grouped_query_attention", "_has_same_bits"),
    "layer_kernels": ("runtime.kernels.decoder_layer", "layer_forward"),
    "norm_kernels": ("runtime.kernels.rms_norm", "in_one_kernel"),
    "one_row_4bit": ("runtime.kernels.one_row_4bit", "_compare"),
    "rotary_kernels": ("runtime.kernels.rotary", "in_one_kernel"),
}
#: Patches that may return without a call of the original, and copy nothing of it.
WHY = {
    "captured_decoding": "a graph repeats kernels of the model's own step; the prepared inputs and "
    "the lent memory are those that the original made before",
    "captured_drafting": "as captured_decoding; its rounds are those of upstream, once each",
    "clippable_linear": "a wrapper is no target; any other name is the original's to decide",
    "loss_memory": "outside of a forward with lazy logits, there is nothing to convert or to find",
    "ple_training_memory": "the original runs inside the checkpoint",
    "sliding_prompt_attention": "it calls transformers' function for each part of the prompt",
}


def function_of(place):
    """The function that a replacement calls instead, or the factory of ``replaces``."""
    function = place.factory
    while "function" in function.__code__.co_freevars:  # of ``calling``
        names = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        function = names["function"].cell_contents
    return function


def may_skip(function):
    """Whether a path through a function, or through a wrapper inside it, has no ``original()``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    called = next(iter(inspect.signature(function).parameters))
    code = Code(called, vars(sys.modules[function.__module__]))
    inner = [node for node in ast.walk(tree) if is_wrapper(node, called)]
    last = tree.body[-1]
    if not inner and isinstance(last, ast.Return) and ast.unparse(last).endswith(f")({called})"):
        return False  # ``return calling(function)(original)``: function is looked at elsewhere
    return not all(code.always_calls(each.body) for each in inner or [tree])


def is_wrapper(node, called):
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else ()
    return any(ast.unparse(each) == f"wraps({called})" for each in decorators)


class Code:
    """Looks for calls of a name in each path through code."""

    def __init__(self, called, names):
        self.called, self.names = called, names

    def always_calls(self, body):
        """Whether each path through statements calls it or raises an error."""
        for statement in body:
            if self.calls(statement):
                return True
            if self.may_return(statement):
                return False
        return False

    def may_return(self, node):
        """Whether a path through a statement returns without a call."""
        if isinstance(node, ast.Return):
            return not self.calls(node)
        if isinstance(node, ast.If) and self.calls(node.test):
            return False
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [each.body for each in getattr(node, "handlers", [])]
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) or not isinstance(node, ast.stmt):
            return False
        return any(self._returns_before(block) for block in blocks)

    def _returns_before(self, body):
        for statement in body:
            if self.may_return(statement):
                return True
            if self.calls(statement):
                return False
        return False

    def calls(self, node):
        """Whether each path through a statement or an expression calls it, or raises an error."""
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            return False
        if isinstance(node, ast.Call) and self._is_call(node):
            return True
        if isinstance(node, ast.If):
            both = self.always_calls(node.body) and self.always_calls(node.orelse)
            return both or self.calls(node.test)
        if isinstance(node, ast.IfExp):
            both = self.calls(node.body) and self.calls(node.orelse)
            return both or self.calls(node.test)
        if isinstance(node, ast.BoolOp):
            return self.calls(node.values[0])
        if isinstance(node, (ast.For, ast.While, ast.comprehension)):
            return self.calls(node.test if isinstance(node, ast.While) else node.iter)
        if isinstance(node, ast.With):
            return any(map(self.calls, node.items)) or self.always_calls(node.body)
        if isinstance(node, ast.Try):
            handled = all(self.always_calls(each.body) for each in node.handlers)
            return (self.always_calls(node.body) and handled) or self.always_calls(node.finalbody)
        return any(map(self.calls, ast.iter_child_nodes(node)))

    def _is_call(self, node):
        """A call of it, or of a function that gets it first, and calls it."""
        if isinstance(node.func, ast.Name) and node.func.id == self.called:
            return True
        first = node.args[0] if node.args else None
        if not (isinstance(first, ast.Name) and first.id == self.called):
            return False
        try:
            function = eval(ast.unparse(node.func), dict(self.names))
        except NameError:  # a local function
            return False
        return inspect.isfunction(function) and not may_skip(function)


def is_of_released_versions(patch):
    """Whether no later release of one of the libraries can have the patch."""
    gates = [patch.gate_of(unit) for unit in patch.units]
    return all(any(ends(Requirement(text)) for text in gate) for gate in gates)


def ends(requirement):
    return requirement.name in LIBRARIES and any(
        each.operator in ("<", "<=", "==") for each in requirement.specifier
    )


def skipping():
    """The patches that may return without a call of the original."""
    return {
        name
        for name, patch in PATCHES.items()
        if any(may_skip(function_of(t)) for t in patch.targets)
    }


def knows_the_code(patch):
    return any(unit.copied for unit in (patch, *patch.parts)) or is_of_released_versions(patch)


def test_each_replacement_obeys():
    unlawful = {n for n in skipping() if not knows_the_code(PATCHES[n])} - {*COMPARED, *WHY}
    assert unlawful == set()


def test_no_exception_is_left_over():
    needed = {name for name in skipping() if not is_of_released_versions(PATCHES[name])}
    assert {*WHY} <= needed
    assert not {*WHY} & {*COMPARED}
    assert not [name for name in WHY if any(unit.copied for unit in PATCHES[name].units)]


@pytest.mark.parametrize("name", COMPARED)
def test_it_is_compared(name):
    """The function that is named compares, or asks whether the code is measured."""
    module, function = COMPARED[name]
    source = inspect.getsource(getattr(sys.modules[f"gemma4_compat.{module}"], function))
    ways = (".compared(", ".checked", "require_", "is_measured")
    assert any(way in source for way in ways)
    assert PATCHES[name].kind is not Kind.FIX


CALLS = """
return original(x)
---
y = original(x)
return y
---
if x:
    return original(x)
return original(y)
---
try:
    return original(x)
finally:
    x.close()
---
with x:
    return original(x)
---
return helper(original, x)
---
if original(x):
    return 1
---
if x:
    raise ValueError
return original(x)
"""
SKIPS = """
return x
---
if x:
    return 1
return original(x)
---
try:
    return original(x)
except ValueError:
    return 1
---
for each in x:
    original(each)
---
return x and original(x)
---
return original(x) if x else x
---
def inner():
    return original(x)
return inner
---
return skipping_helper(original, x)
---
with x:
    if x.y:
        return 1
    original(x)
---
while x:
    return 1
original(x)
"""


def helper(original, x):
    return original(x)


def skipping_helper(original, x):
    return x


@pytest.mark.parametrize("body", CALLS.split("---"))
def test_code_that_calls(body):
    assert Code("original", globals()).always_calls(ast.parse(body).body)


@pytest.mark.parametrize("body", SKIPS.split("---"))
def test_code_that_may_skip(body):
    assert not Code("original", globals()).always_calls(ast.parse(body).body)
