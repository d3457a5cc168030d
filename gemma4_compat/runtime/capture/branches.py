"""Runs the MLP of a decoder layer beside its experts, in a captured step.

A layer of 26B-A4B computes its MLP and its experts from the same hidden states, one after the
other, and adds the results.  In a CUDA graph the MLP gets a branch of its own, with the norm that
follows it.  The kernels and their inputs are the same, so the logits are equal bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType
from typing import Any

from ...model.hooks import offload_hook
from ..kernels.streams import Fork, is_capturing

#: The submodules that a layer runs after its attention, in this order: first one branch, ...
_MLP = ("mlp", "post_feedforward_layernorm_1")
#: ... then the other.
_EXPERTS = (
    "router", "pre_feedforward_layernorm_2", "experts", "post_feedforward_layernorm_2",
)  # fmt: skip


@contextmanager
def side_by_side(modules: Iterable[Any], device: Any) -> Iterator[None]:
    """In this context, the layers among these modules fork their MLP from their experts."""
    with ExitStack() as stack:
        for module in modules:
            if has_two_branches(module):
                branch = _Branch(device)
                stack.callback(branch.close)
                for handle in branch.hooks(module):
                    stack.callback(handle.remove)
        yield


def has_two_branches(layer: Any) -> bool:
    """Whether the MLP of a layer can run beside its experts.

    Offloaded MLPs stay in line: memory that their copies use must belong to the main stream.
    """
    parts = layer._modules
    if any(parts.get(name) is None for name in (*_MLP, *_EXPERTS)):
        return False
    code = _own_code_of_transformers(layer)
    names = () if code is None else code.co_names
    if tuple(name for name in names if name in (*_MLP, *_EXPERTS)) != (*_MLP, *_EXPERTS):
        return False
    branch = (module for name in _MLP for module in parts[name].modules())
    return all(offload_hook(module) is None for module in branch)


def _own_code_of_transformers(layer: Any) -> CodeType | None:
    """The code of a layer's forward; ``None`` if a user has replaced the forward, or wrapped it."""
    forward, own = type(layer).forward, vars(layer)
    instances = own.get("_old_forward") if "_hf_hook" in own else own.get("forward")
    if instances is not None and getattr(instances, "__func__", None) is not forward:
        return None
    code: CodeType | None = None
    while forward is not None:  # through the decorators of transformers
        code = getattr(forward, "__code__", None)
        if not str(getattr(forward, "__globals__", {}).get("__name__")).startswith("transformers."):
            return None
        forward = getattr(forward, "__wrapped__", None)
    return code


class _Branch:
    """The branch of one layer with its MLP."""

    def __init__(self, device: Any) -> None:
        self.fork = Fork(device, "mlp")
        self.thread: int | None = None  # the one that captures; others may run the model meanwhile
        self.is_open = False
        self.inputs: Any = None

    def hooks(self, layer: Any) -> Iterator[Any]:
        """Attach the branch to a layer; yields the handles of its hooks."""
        first, last = (layer._modules[name] for name in _MLP)
        yield first.register_forward_pre_hook(self.begin, with_kwargs=True)
        yield last.register_forward_hook(self.end)
        yield layer._modules[_EXPERTS[-1]].register_forward_hook(self.join)

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        if is_capturing(self.fork.device):
            self.thread = threading.get_ident()
            self.inputs = args, kwargs  # else the other branch could reuse their memory
            self.fork.__enter__()
            self.is_open = True

    def end(self, *_: Any) -> None:
        if self.thread == threading.get_ident():
            self.fork.__exit__()
            self.is_open = False

    def join(self, *_: Any) -> None:
        if self.thread == threading.get_ident():
            self.fork.join()
            self.inputs = self.thread = None

    def close(self) -> None:
        """End the branch after a forward that raised."""
        if self.is_open:
            self.end()
        with suppress(RuntimeError):  # the capture has failed already
            self.join()
