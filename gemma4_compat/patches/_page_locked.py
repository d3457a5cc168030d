"""Host memory that is page-locked, and that a GPU reads where it is."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from contextlib import suppress
from functools import cache
from typing import Any

from ..model.hooks import host_tensor
from ..model.host_memory import page_locked_limit
from ._not_copied import NotCopied, attached

logger = logging.getLogger(__name__)

#: Only there has registered host memory one address for both, CPU and GPU.
_READABLE_IN_PLACE = sys.platform == "linux"
_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped

_counting = threading.RLock()  # a finalizer may run while it is held
_locked = 0  # bytes


def page_lock(memory: Any, device: Any = None) -> bool:
    """Page-lock the memory of a tensor until this tensor object dies; whether that succeeded."""
    import torch

    nbytes = memory.nbytes
    if not torch.cuda.is_available() or not _take(nbytes):
        return False
    with torch.cuda.device(device):
        cuda = torch.cuda.cudart()
        arguments = (memory.data_ptr(), nbytes, _PORTABLE_AND_MAPPED)
        if int(cuda.cudaHostRegister(*arguments)) != 0:
            _take(-nbytes)
            # CUDA keeps the error for whoever asks next, which is the next kernel.
            with suppress(RuntimeError):
                torch.zeros((), device="cuda")
            return False
    finalizer = weakref.finalize(memory, _unlock, memory.data_ptr(), nbytes, device)
    finalizer.atexit = False
    return True


def _unlock(pointer: int, nbytes: int, device: Any) -> None:
    import torch

    torch.cuda.synchronize(device)  # a kernel may be reading it
    torch.cuda.cudart().cudaHostUnregister(pointer)
    _take(-nbytes)


def _take(nbytes: int) -> bool:
    """Count page-locked memory, if the limit allows as much."""
    global _locked
    with _counting:
        if nbytes > 0 and _locked + nbytes > page_locked_limit():
            return False
        _locked += nbytes
        return True


class InPlace(NotCopied):
    """A table in host memory as a tensor on a GPU, which reads it in place.

    The memory is page-locked at the first lookup that records no graph, and until this object and
    what it gave out are gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: Any = None  # of the table that was tried
        self._view: Any = None

    def on(self, table: Any, device: Any) -> Any | None:
        """``table`` on ``device``, or ``None`` where the GPU cannot read it in place."""
        import torch

        key = (table.data_ptr(), table.shape, table.dtype, device)
        if key != self._key and not torch.is_grad_enabled():
            with self._lock:
                if key != self._key:
                    self._view = None
                    self._view = _readable(table, device)
                    self._key = key
        return self._view if key == self._key else None

    @property
    def nbytes(self) -> int | None:
        """How much memory is page-locked, in bytes; ``None`` where that was tried in vain."""
        if self._view is None:
            return 0 if self._key is None else None
        return int(self._view.nbytes)


def in_place_of(hook: Any) -> InPlace | None:
    """What reads the weight that a hook offloads in place; ``None`` if it is not in memory."""
    if host_tensor(hook.weights_map, "weight") is None:
        return None
    return attached(hook, "_in_place", InPlace)  # type: ignore[no-any-return]


def _readable(table: Any, device: Any) -> Any | None:
    import torch

    if device.type != "cuda" or not table.is_contiguous():
        return None
    with torch.inference_mode(mode=False), torch.no_grad():
        locked = table.detach()
        if not (_READABLE_IN_PLACE and page_lock(locked, device)):
            _say_pageable(table.nbytes)
            return None
        seen = torch.as_tensor(_OnGpu(locked))
        if seen.device != device:
            return None
        return seen.view(table.dtype).view(table.shape)


class _OnGpu:
    """Page-locked memory, for ``torch.as_tensor``: the tensor keeps this object alive."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.__cuda_array_interface__ = {
            "data": (table.data_ptr(), False),
            "shape": (table.nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


@cache
def _say_pageable(size: int) -> None:
    logger.warning(
        "%.1f GiB of embeddings on the CPU cannot be page-locked, so the GPU cannot read them in "
        "place.  Each lookup waits for the CPU, and decode steps are not captured as CUDA graphs.",
        size / 2**30,
    )


def nbytes_in_place(hook: Any) -> int:
    """How much of what a hook offloads is page-locked and read in place, in bytes."""
    in_place: InPlace | None = vars(hook).get("_in_place")
    return 0 if in_place is None else in_place.nbytes or 0
