"""Dequantized weights of experts, which autograd does not keep for the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from ...errors import ModelError
from ...model.quant_state import is_of_offloaded
from .packed import Packed
from .update import Update, added, with_gradients


def is_watched() -> bool:
    """Whether a dispatch mode sees the operators, such as selective checkpointing."""
    from torch.utils import _python_dispatch

    return _python_dispatch._get_current_dispatch_mode() is not None


class Lent:
    """Dequantized weights that autograd does not keep for the backward: it gets them again.

    Args:
        in_turn: Each weight is used until the next one is lent.  Then its memory is freed, although
            the function that read it still has a variable for it.
    """

    def __init__(self, in_turn: bool) -> None:
        self._made: dict[int, tuple[Any, int, Callable[[], Any]]] = {}
        self._in_turn = in_turn
        self._last: Callable[[], Any] = lambda: None
        self._hooks: Any = None

    def lend(self, packed: Packed, number: int | None = None) -> Any:
        """These experts, or one of them, dequantized: in the backward again."""
        self._free_last()
        again = self._again_of(packed)
        return self._lend(packed.whole(number), lambda: again().whole(number))

    def lend_sum(self, packed: Packed, update: Update) -> Any:
        """The sum of these experts and an update, for autograd."""
        import torch

        assert update.factors is not None
        self._free_last()
        if torch.compiler.is_compiling() or is_watched():
            return update.add(packed.whole())
        left, right, scaling = update.factors()
        if self._hooks is None:
            return self._lend(added(packed.whole(), left, right, scaling), packed.whole)
        keep, give = self._hooks
        kept = [keep(each.detach().clone()) for each in (left, right)]  # they may be parameters
        again = self._again_of(packed)

        def add(experts: Packed, left: Any, right: Any) -> Any:
            return added(experts.whole(), left, right, scaling)

        weight = with_gradients()(left, right, scaling, partial(add, packed))
        return self._lend(weight, lambda: add(again(), *map(give, kept)))

    def _again_of(self, packed: Packed) -> Callable[[], Packed]:
        """A function that returns these experts.  A checkpoint drops copies of offloaded ones."""
        if self._hooks is None or packed.in_host_memory or not is_of_offloaded(packed.state):
            return lambda: packed
        return packed.through(*self._hooks)

    def _free_last(self) -> None:
        if (weight := self._last()) is not None:
            weight.untyped_storage().resize_(0)

    def _lend(self, weight: Any, make: Callable[[], Any]) -> Any:
        import torch

        if self._in_turn and not torch.compiler.is_compiling():
            self._last = weakref.ref(weight)
        if self._hooks is not None and not weight.is_inference():
            made = weakref.ref(weight), weight._version, make
            self._made[weight.untyped_storage()._cdata] = made
        return weight

    def hooks(self) -> Any:
        """A context in which autograd saves no weight that was lent, and no view of one."""
        import torch

        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return nullcontext()
        keep, give = self._hooks = _outer_hooks()

        def pack(tensor: Any) -> Any:
            return self._again(tensor) or keep(tensor)

        def unpack(saved: Any) -> Any:
            return saved() if isinstance(saved, _Again) else give(saved)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _again(self, tensor: Any) -> _Again | None:
        """What makes a tensor again; ``None`` unless it has values of a weight as it was lent."""
        import torch

        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if tensor.layout is not torch.strided or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()._cdata
        lent, version, make = self._made.get(storage, (None, 0, None))
        weight = None if lent is None else lent()
        if (
            weight is None
            or weight.untyped_storage()._cdata != storage  # the weight's .data was replaced
            or weight._version != version  # changed in place
            or tensor.dtype != weight.dtype
        ):
            return None
        return _Again(make, tensor.size(), tensor.stride(), tensor.storage_offset())


class _Again:
    """A weight, or a view of one, that the backward dequantizes again."""

    def __init__(self, make: Any, *view: Any) -> None:
        self.make, self.view = make, view

    def __call__(self) -> Any:
        return self.make().as_strided(*self.view)


def _outer_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What checkpointing does with a saved tensor; only the innermost hooks are called."""
    import torch

    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    outer = top(False) if top is not None else None
    return outer or (_with_version, _unchanged)


def _with_version(tensor: Any) -> tuple[Any, int | None]:
    return tensor, None if tensor.is_inference() else tensor._version


def _unchanged(saved: tuple[Any, int | None]) -> Any:
    """A saved tensor.  PyTorch checks no versions of tensors that pass through hooks."""
    tensor, version = saved
    if version is not None and tensor._version != version:
        raise ModelError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {tensor.dtype} tensor {[*tensor.shape]} of experts in 4 bits, or of "
            "their adapter.  Call backward before the change."
        )
    return tensor
