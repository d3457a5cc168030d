"""Runs the MLP of a decoder layer beside its experts, in a captured step.

A layer of 26B-A4B computes its MLP and its experts from the same hidden states, one after the
other, and adds the results.  In a CUDA graph the MLP gets a branch of its own, with the norm that
follows it.  The kernels and their inputs are the same, so the logits are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType
from typing import Any

from ...model.hooks import offload_hook
from ..kernels.step import Call, has_own_forward
from ..kernels.streams import Fork

#: The submodules that a layer runs after its attention, in this order: first one branch, ...
_MLP = ("mlp", "post_feedforward_layernorm_1")
#: ... then the other.
_EXPERTS = (
    "router", "pre_feedforward_layernorm_2", "experts", "post_feedforward_layernorm_2",
)  # fmt: skip


@contextmanager
def side_by_side(modules: Iterable[Any], device: Any) -> Iterator[list[Call]]:
    """A context for a capture, with calls that fork the MLPs of these layers from their experts."""
    with ExitStack() as stack:
        calls: list[Call] = []
        for layer in filter(has_two_branches, modules):
            branch = _Branch(device)
            stack.callback(branch.close)
            calls += branch.calls(layer)
        yield calls


def has_two_branches(layer: Any) -> bool:
    """Whether the MLP of a layer can run beside its experts.

    Offloaded MLPs stay in line: memory that their copies use must belong to the main stream.
    """
    parts = layer._modules
    if any(parts.get(name) is None for name in (*_MLP, *_EXPERTS)):
        return False
    if not all(map(has_own_forward, (layer, *map(parts.get, (*_MLP, _EXPERTS[-1]))))):
        return False
    code = code_of_transformers(type(layer).forward)
    names = () if code is None else code.co_names
    if tuple(name for name in names if name in (*_MLP, *_EXPERTS)) != (*_MLP, *_EXPERTS):
        return False
    branch = (module for name in _MLP for module in parts[name].modules())
    return all(offload_hook(module) is None for module in branch)


def code_of_transformers(function: Any) -> CodeType | None:
    """The code of a function of transformers; ``None`` if a user has wrapped or replaced it."""
    code: CodeType | None = None
    while function is not None:  # through the decorators of transformers
        code = getattr(function, "__code__", None)
        module = str(getattr(function, "__globals__", {}).get("__name__"))
        if not module.startswith("transformers."):
            return None
        function = getattr(function, "__wrapped__", None)
    return code


class _Branch:
    """The branch of one layer with its MLP."""

    def __init__(self, device: Any) -> None:
        self.fork = Fork(device, "mlp")
        self.inputs: Any = None  # until the branch has ended, for the other one not to reuse them

    def calls(self, layer: Any) -> Iterator[Call]:
        own = (*_MLP, _EXPERTS[-1])
        functions = self.begin, self.end, self.join
        return zip(map(layer._modules.get, own), functions, strict=True)

    def begin(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        self.inputs = args, kwargs
        self.fork.__enter__()
        return forward(*args, **kwargs)

    def end(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        self.fork.__exit__()
        return output

    def join(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        self.fork.join()
        self.inputs = None
        return output

    def close(self) -> None:
        """End a branch that a forward left open by an error: captures do not end with it."""
        if self.inputs is not None:
            self.fork.__exit__()
            with suppress(RuntimeError):  # the capture has failed already
                self.fork.join()
