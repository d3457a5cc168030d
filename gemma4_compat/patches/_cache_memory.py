"""The memory of static caches, lent from one cache to the next: CUDA graphs write to addresses."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any


class Memory:
    """The tensors of one static cache; the graphs that use them are kept with them.

    They are lent to one cache after the other, as tensors of its own: this object's are other
    views of the same memory.  So the memory is free when these are its only holders.
    """

    def __init__(self, cache: Any, placement: Any) -> None:
        self.used_by = weakref.ref(cache)
        self.placement = placement
        self.steps: dict[Any, Any] = {}  # the graphs that use it
        self.pool: Any = None
        self.layers = [_Layer(layer) for layer in layers_of(cache)]
        self.lengths = _lengths(cache)
        self.batch_size = self.layers[0].tensors[0].shape[0]

    def is_free(self) -> bool:
        return self.used_by() is None and all(layer.is_free() for layer in self.layers)

    def fits(self, cache: Any, batch_size: int, placement: Any) -> bool:
        import torch

        return (
            batch_size == self.batch_size
            and self.lengths == _lengths(cache)
            and self.placement == placement
            and self.layers[0].tensors[0].is_inference() == torch.is_inference_mode_enabled()
        )

    def lend_to(self, cache: Any) -> None:
        self.used_by = weakref.ref(cache)
        for own, layer in zip(self.layers, layers_of(cache), strict=True):
            own.lend_to(layer)

    def is_in(self, cache: Any) -> bool:
        """Whether the cache still uses it."""
        pairs = zip(self.layers, layers_of(cache), strict=True)
        return all(own.is_in(layer) for own, layer in pairs)


class _Layer:
    """The tensors of one layer of a static cache, and its settings."""

    def __init__(self, layer: Any) -> None:
        import torch

        own = vars(layer)
        self.names = tuple(name for name in own if isinstance(own[name], torch.Tensor))
        self.tensors = [own[name].detach() for name in self.names]
        self.pointers = [tensor.data_ptr() for tensor in self.tensors]
        self.settings = {
            name: value
            for name, value in own.items()
            if name not in self.names and name != "cumulative_length_int"
        }

    def is_free(self) -> bool:
        return all(_holders(tensor) == _ALONE for tensor in self.tensors)

    def lend_to(self, layer: Any) -> None:
        vars(layer).update(self.settings)
        for name, tensor in zip(self.names, self.tensors, strict=True):
            tensor.zero_()
            setattr(layer, name, tensor.detach())

    def is_in(self, layer: Any) -> bool:
        found = (getattr(layer, name).data_ptr() for name in self.names)
        return all(a == b for a, b in zip(self.pointers, found, strict=True))


def layers_of(cache: Any) -> list[Any]:
    """The layers of a static cache that hold tokens; others take those of a layer before."""
    from transformers.cache_utils import StaticLayer

    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, StaticLayer)]


def _lengths(cache: Any) -> tuple[Any, ...]:
    return tuple((type(layer), layer.max_cache_len) for layer in layers_of(cache))


def _holders(tensor: Any) -> int:
    """How many tensors, and others, hold the memory of this one."""
    import torch

    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = 2  # the tensor, and the storage object of the question


def counting_layers(cache: Any) -> Iterator[Any]:
    """The layers that count their tokens in Python too: sliding ones."""
    return (layer for layer in cache.layers if hasattr(layer, "cumulative_length_int"))


def full_layers(cache: Any) -> tuple[bool, ...]:
    """Which sliding windows are full: ``update`` computes otherwise then."""
    return tuple(
        layer.cumulative_length_int >= layer.max_cache_len for layer in counting_layers(cache)
    )
