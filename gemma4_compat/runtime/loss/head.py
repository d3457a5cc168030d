"""The head of a model, as it is in a forward with labels, and how many rows fit into memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import ModelError
from ...objects import View

#: of memory for a piece of the logits, its copies and its gradients
BYTES = 256 * 1024**2
#: entries of the vocabulary that are summed at once; a CPU converts them first
_SUMMED = 8192
_CHANGED = (
    "the weight of the head was changed after the forward, so its logits cannot be computed now: "
    "read outputs.logits, and call backward, before the change, or set "
    "GEMMA4_COMPAT_LOSS_MEMORY=0"
)
_WATCHED = (
    "outputs.logits has a hook or retain_grad(), but the loss was computed without these logits, "
    "so they would not see its gradient; set GEMMA4_COMPAT_LOSS_MEMORY=0"
)


def rows_of(entries: int, like: Any) -> int:
    """The number of rows in a piece of PyTorch's loss.

    An entry of the logits needs two tensors of the head's dtype, a float32 copy, its logarithm and
    two gradients of that.
    """
    return max(1, BYTES // (entries * (2 * int(like.element_size()) + 16)))


class Head:
    """``lm_head`` with the weight and the modes of PyTorch that it has now."""

    def __init__(self, module: Any) -> None:
        import torch

        #: the parameter if it is trained
        self.trained: Any = module.weight if module.weight.requires_grad else None
        # Code that replaces the data of the parameter, or unfreezes it, leaves this tensor alone.
        weight = module.weight.detach()
        self._address = weight.data_ptr()
        self.entries, self.device = int(module.out_features), weight.device
        self._module, self._weight, self._version = module, weight, weight._version
        #: whether the weight is no longer that of the forward
        self._has_changed, self._sums = False, _sums_of(weight)
        #: returns what the graph of the loss keeps; ``None`` if there is none
        self.kept: Callable[[], Any] = lambda: None
        # On meta, ``plan`` counts what a step needs; PyTorch has no autocast there.
        kind = "cpu" if weight.is_meta else self.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._autocast = (kind, dtype, enabled)
        #: the dtype of the logits
        self.dtype = dtype if enabled and weight.dtype != torch.float64 else weight.dtype

    @property
    def weight(self) -> Any:
        """The weight in the dtype of the logits."""
        kept = self.kept()
        return self._weight.to(self.dtype) if kept is None else kept.weight

    def kernel_rows(self) -> int:
        """The number of rows in a piece of the loss's own kernel, which needs the logits alone."""
        return max(1, BYTES // (self.entries * int(self.dtype.itemsize)))

    def compare(self) -> None:
        """Notice a change through ``.data``, which leaves the version of the weight as it is."""
        if not self._sums.is_meta:
            self._has_changed = not self._sums.equal(_sums_of(self._weight))

    def copy(self) -> Any:
        """The weight of a trained head, for reads after the step of the optimizer."""
        if self.trained is None:
            return None
        return self.weight.clone() if self.weight is self._weight else self.weight

    def __call__(self, hidden: Any, late: Any = None, trained: Any = None) -> Any:
        """Logits, of the ``late`` weight if the own one has changed.

        ``trained`` is a view of the trained weight for which a gradient is wanted.
        """
        import torch

        is_trained = self.trained is not None
        has_changed = self._has_changed or self._weight._version != self._version
        if has_changed or (is_trained and self.trained.data_ptr() != self._address):
            if late is None:
                raise ModelError(_CHANGED)
            weight = late
        elif is_trained and torch.is_grad_enabled():
            weight = self.trained if trained is None else trained
        else:
            weight = self.weight
        if hasattr(self._module, "_hf_hook"):  # which may move the hidden states
            return self._module(hidden)
        return type(self._module).forward(View(self._module, weight=weight), hidden)

    @contextmanager
    def modes(self) -> Iterator[None]:
        import torch

        kind, dtype, enabled = self._autocast
        autocast = torch.autocast(kind, dtype, enabled=enabled)
        with torch.inference_mode(False), torch.enable_grad(), autocast:
            yield


class Kept:
    """What the graph of the loss keeps until PyTorch frees it."""

    def __init__(self, head: Head) -> None:
        #: the weight as autocast would convert it for each piece, and the logits that were read
        self.weight, self.read = head.weight, list[Any]()
        head.kept = weakref.ref(self)

    def check_watchers(self) -> None:
        if any(each._backward_hooks or each.retains_grad for each in self.read):
            raise ModelError(_WATCHED)


def _sums_of(weight: Any) -> Any:
    """The bits of sums for some entries of the vocabulary at a time: of columns, and of places.

    The second changes if entries change places.
    """
    import torch

    exact = torch.promote_types(weight.dtype, torch.float32)
    sums = []
    for part in weight.split(_SUMMED):
        rows = part.sum(1, dtype=exact)
        places = torch.arange(len(rows), dtype=exact, device=rows.device)
        sums += [part.sum(0, dtype=exact), (rows * places).sum(0, keepdim=True)]
    return torch.cat(sums).view(torch.uint8)
