"""Lends the memory of a static cache to the next one, because CUDA graphs use fixed addresses."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from ...objects import NotCopied

_LENT = "_lent"  # attribute of a cache layer


class Memory:
    """The tensors of one static cache, with the graphs that use them.

    One cache after the other borrows the memory.  Each gets new tensors, which are views of the
    same storage.  The memory is free when only the tensors of this object hold the storage.
    """

    def __init__(self, cache: Any) -> None:
        self.used_by = weakref.ref(cache)
        self.steps: dict[Any, Any] = {}  # the graphs that use this memory
        self.pool: Any = None
        self.layers = [_Layer(layer) for layer in layers_of(cache)]
        self.lengths = _lengths(cache)
        self.batch_size = self.layers[0].tensors["keys"].shape[0]

    def is_free(self) -> bool:
        return self.used_by() is None and all(layer.is_free() for layer in self.layers)

    def fits(self, cache: Any, batch_size: int) -> bool:
        return batch_size == self.batch_size and self.lengths == _lengths(cache)

    def lend_to(self, cache: Any) -> None:
        """Offer the memory to the layers of ``cache``; see ``use_lent``."""
        self.used_by = weakref.ref(cache)
        for own, layer in zip(self.layers, layers_of(cache), strict=True):
            setattr(layer, _LENT, own)

    def is_in(self, cache: Any) -> bool:
        """Whether the cache still uses this memory."""
        pairs = zip(self.layers, layers_of(cache), strict=True)
        return all(own.is_in(layer) for own, layer in pairs)


def use_lent(layer: Any, key_states: Any, value_states: Any, *args: Any) -> bool:
    """Initialise a cache layer with the tensors that were lent to it.

    Returns ``False`` if none were lent, or if they do not fit the layer's first keys and values.
    """
    own: _Layer | None = vars(layer).pop(_LENT, None)
    if own is None or not own.fits(key_states, value_states):
        return False
    own.lend_to(layer)
    return True


class _Layer(NotCopied):
    """The tensors of one layer of a static cache, and its settings."""

    def __init__(self, layer: Any) -> None:
        import torch

        own = vars(layer)
        self.tensors = {n: v.detach() for n, v in own.items() if isinstance(v, torch.Tensor)}
        self.pointers = [tensor.data_ptr() for tensor in self.tensors.values()]
        self.settings = {
            name: value
            for name, value in own.items()
            if name not in self.tensors and name != "cumulative_length_int"
        }

    def is_free(self) -> bool:
        return all(_holders(tensor) == _UNSHARED for tensor in self.tensors.values())

    def fits(self, key_states: Any, value_states: Any) -> bool:
        import torch

        own = self.tensors["keys"], self.tensors["values"]
        return all(
            (tensor.dtype, tensor.device, tensor.shape[:2], tensor.shape[3])
            == (states.dtype, states.device, states.shape[:2], states.shape[3])
            and tensor.is_inference() == torch.is_inference_mode_enabled()
            for tensor, states in zip(own, (key_states, value_states), strict=True)
        )

    def lend_to(self, layer: Any) -> None:
        vars(layer).update(self.settings)
        for name, tensor in self.tensors.items():
            tensor.zero_()
            setattr(layer, name, tensor.detach())

    def is_in(self, layer: Any) -> bool:
        pointers = (getattr(layer, name).data_ptr() for name in self.tensors)
        return all(a == b for a, b in zip(self.pointers, pointers, strict=True))


def layers_of(cache: Any) -> list[Any]:
    """The layers of a static cache that store keys and values; the others share those."""
    from transformers.cache_utils import StaticLayer

    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, StaticLayer)]


def _lengths(cache: Any) -> tuple[Any, ...]:
    return tuple((type(layer), layer.max_cache_len) for layer in layers_of(cache))


def _holders(tensor: Any) -> int:
    """How many objects hold the storage of a tensor."""
    import torch

    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_UNSHARED = 2  # the tensor itself, and the storage object that ``_holders`` makes


def counting_layers(cache: Any) -> Iterator[Any]:
    """The sliding layers, which count their tokens in Python too."""
    return (layer for layer in cache.layers if hasattr(layer, "cumulative_length_int"))


def full_layers(cache: Any) -> tuple[bool, ...]:
    """For each sliding layer, whether its window is full; ``update`` runs other kernels then."""
    return tuple(
        layer.cumulative_length_int >= layer.max_cache_len for layer in counting_layers(cache)
    )
