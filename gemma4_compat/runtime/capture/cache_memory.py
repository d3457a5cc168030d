"""Lends the memory of a static cache to the next one, because CUDA graphs use fixed addresses."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from functools import cache as cached
from typing import Any

from ...objects import NotCopied
from ..kernels.watch import is_of_user

logger = logging.getLogger(__name__)

_LENT = "_lent"  # attribute of a cache layer
#: The attributes that ``lazy_initialization`` sets, besides tensors.
_SETTINGS = frozenset(
    {
        "dtype", "device", "batch_size", "max_batch_size", "num_heads", "k_head_dim", "v_head_dim",
        "is_initialized",
    }
)  # fmt: skip
_COUNTER = "cumulative_length_int"
_COUNTERS = (_COUNTER, "first_kept_int")
#: the modules of the caches whose steps are captured
_USUAL = ("transformers.cache_utils", f"{__package__}.rollback")


class Memory:
    """The tensors of one static cache, with the graphs that use them.

    One cache after the other borrows the memory.  Each gets new tensors, which are views of the
    same storage.  The memory is free when only the tensors of this object hold the storage.
    """

    def __init__(self, cache: Any) -> None:
        self.used_by = weakref.ref(cache)
        self.steps: dict[Any, Any] = {}  # the graphs that use this memory
        self.pool: Any = None
        self.layers = [_LentLayer(layer) for layer in layers_of(cache)]
        self.pointers = [t.data_ptr() for own in self.layers for t in own.tensors.values()]
        self.lengths = _lengths(cache)
        keys = self.layers[0].tensors["keys"]
        self.batch_size, self.device = keys.shape[0], keys.device

    def is_free(self) -> bool:
        return self.used_by() is None and all(layer.is_free() for layer in self.layers)

    def fits(self, cache: Any, batch_size: int) -> bool:
        return batch_size == self.batch_size and self.lengths == _lengths(cache)

    def lend_to(self, cache: Any) -> None:
        """Offer the memory to the layers of ``cache``; see ``use_lent``."""
        self.used_by = weakref.ref(cache)
        for own, layer in zip(self.layers, layers_of(cache), strict=True):
            setattr(layer, _LENT, own)

    def is_in(self, cache: Any, layers: list[Any] | None = None) -> bool:
        """Whether this cache still uses this memory; ``layers`` are those of ``layers_of``."""
        if self.used_by() is not cache:
            return False
        pairs = zip(self.layers, layers_of(cache) if layers is None else layers, strict=False)
        return self.pointers == [
            vars(layer)[name].data_ptr() for own, layer in pairs for name in own.tensors
        ]


def use_lent(layer: Any, key_states: Any, value_states: Any, *args: Any) -> bool:
    """Initialize a cache layer with the tensors that were lent to it.

    Returns ``False`` if none were lent, or if they do not fit the layer's first keys and values.
    """
    own: _LentLayer | None = vars(layer).pop(_LENT, None)
    if own is None:
        return False
    try:
        if fits := own.is_like(layer) and own.fits(key_states, value_states):
            own.lend_to(layer)
        return fits
    except Exception as error:
        if is_of_user(error):
            raise
        logger.debug("the memory of a cache is not lent", exc_info=True)
        return False


class _LentLayer(NotCopied):
    """The tensors of one layer of a static cache, and its settings."""

    def __init__(self, layer: Any) -> None:
        import torch

        own = vars(layer)
        self.tensors = {n: v.detach() for n, v in own.items() if isinstance(v, torch.Tensor)}
        others = {n: v for n, v in own.items() if n not in self.tensors and n not in _COUNTERS}
        self.settings = {n: others.pop(n) for n in _SETTINGS & others.keys()}
        self.others = others

    def is_like(self, layer: Any) -> bool:
        """Whether a new layer has the same attributes that this package does not know."""
        own = vars(layer)
        return all(name in own and own[name] == value for name, value in self.others.items())

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


class Layers:
    """The layers of a cache, sorted once for all steps of a generation."""

    def __init__(self, cache: Any) -> None:
        self.all = [*getattr(cache, "layers", ())]
        self.static = layers_of(cache)
        self.counting = [*counting_layers(cache)] if self.static else []
        parts = (cache, *self.all)
        #: whether a user has put no code of his own into this cache
        self.are_usual = all(
            type(each).__module__ in _USUAL and not any(map(callable, vars(each).values()))
            for each in parts
        )

    def are_of(self, cache: Any) -> bool:
        return self.all == getattr(cache, "layers", None)


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


@cached
def can_count_holders(device: Any) -> bool:
    """Whether PyTorch counts the holders of a storage of a device as ``Memory.is_free`` expects."""
    import torch

    try:
        tensor = torch.zeros(1, device=device)
        alone, view = _holders(tensor), tensor.detach()
        return (alone, _holders(view)) == (_UNSHARED, _UNSHARED + 1)
    except Exception:
        logger.debug("the memory of caches is not lent", exc_info=True)
        return False


def counting_layers(cache: Any) -> Iterator[Any]:
    """The sliding layers, which count their tokens in Python too."""
    return (layer for layer in cache.layers if hasattr(layer, _COUNTER))


def full_layers(counting: list[Any]) -> tuple[bool, ...]:
    """For each sliding layer, whether its window is full; ``update`` runs other kernels then."""
    return tuple([layer.cumulative_length_int >= layer.max_cache_len for layer in counting])
