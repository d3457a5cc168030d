"""Page-locked host memory, which a GPU can read in place."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from contextlib import suppress
from functools import cache
from typing import Any

from ...machine.host_memory import page_locked_limit
from ...model.hooks import host_tensor
from ...objects import NotCopied, attached

logger = logging.getLogger(__name__)

#: Only on Linux does registered host memory have the same address on the CPU and the GPU.
_READABLE_IN_PLACE = sys.platform == "linux"
_PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister and of cuMemHostAlloc

_counting = threading.RLock()  # a finalizer may run while it is held
_counted: dict[_Lock, int] = {}  # bytes


def page_lock(memory: Any, device: Any = None) -> bool:
    """Page-lock the memory of a tensor for the life of this tensor object.

    Returns ``False`` without CUDA, beyond the limit, or if the system refuses.
    """
    import torch

    if not torch.cuda.is_available():
        return False
    lock = _Lock(device)
    lock.registered = memory.data_ptr()
    weakref.finalize(memory, lock.undo).atexit = False  # first: an interrupt may come at any line
    if not _take(lock, memory.nbytes):
        return False
    with torch.cuda.device(device):
        cuda = torch.cuda.cudart()
        lock.begun = True
        if int(cuda.cudaHostRegister(lock.registered, memory.nbytes, _PORTABLE_AND_MAPPED)) == 0:
            return True
        lock.begun = False
        lock.undo()
        _forget_the_error()
        return False


def page_locked_memory(nbytes: int, device: Any) -> Any | None:
    """New page-locked memory, uint8 [nbytes]; ``None`` beyond the limit or if the system refuses.

    The kernels of a GPU read it faster than memory that was page-locked afterwards: 50 instead of
    46 GB/s on an H200.
    """
    import ctypes

    import torch

    from ..kernels.compiler import KernelError, driver

    lock, held = _Lock(device), _Held()
    lock.allocated = ctypes.c_void_p()
    weakref.finalize(held, lock.undo).atexit = False  # first: an interrupt may come at any line
    if not _take(lock, nbytes):
        return None
    with torch.cuda.device(device), suppress(KernelError):
        torch.cuda.synchronize()  # makes the CUDA context that of this thread
        size = ctypes.c_size_t(nbytes)
        driver().cuMemHostAlloc(ctypes.byref(lock.allocated), size, _PORTABLE_AND_MAPPED)
    if lock.allocated.value is None:
        return None
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(lock.allocated.value)
    memory.held = held  # views of the tensor keep the array alive, but not the tensor itself
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Held:
    """Page-locked memory is freed after this object."""


class _Lock:
    """What is to be undone of one piece of page-locked memory."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.registered: int = 0  # the address of a tensor
        self.begun = False  # the driver has the address, or is about to get it
        self.allocated: Any = None  # a pointer

    def undo(self) -> None:
        import torch

        from ..kernels.compiler import driver

        if self.begun:
            torch.cuda.synchronize(self.device)  # a kernel may be reading it
            if int(torch.cuda.cudart().cudaHostUnregister(self.registered)) != 0:
                _forget_the_error()
        if self.allocated is not None and self.allocated.value is not None:
            torch.cuda.synchronize(self.device)
            driver().cuMemFreeHost(self.allocated)
        with _counting:
            _counted.pop(self, None)


def _forget_the_error() -> None:
    """CUDA reports an error again at the next kernel: run one, and ignore the error."""
    import torch

    with suppress(RuntimeError):
        torch.zeros((), device="cuda")


def locked() -> int:
    """Bytes of page-locked memory."""
    with _counting:
        return sum(_counted.values())


def _take(lock: _Lock, nbytes: int) -> bool:
    """Count page-locked memory; ``False`` if that exceeds the limit."""
    with _counting:
        if locked() + nbytes > page_locked_limit():
            return False
        _counted[lock] = nbytes
        return True


class InPlace(NotCopied):
    """A table in host memory as a tensor on a GPU, which reads it in place.

    The first lookup outside autograd page-locks the memory.  It stays page-locked as long as this
    object, or a tensor that it returned, is alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: What identifies the latest table, and the table on the GPU if it is readable.
        self._latest: tuple[Any, Any] = None, None

    def on(self, table: Any, device: Any) -> Any | None:
        """``table`` on ``device``, or ``None`` where the GPU cannot read it in place."""
        import torch

        key = (table.data_ptr(), table.shape, table.stride(), table.dtype, device)
        if key != self._latest[0] and not torch.is_grad_enabled():
            with self._lock:
                if key != self._latest[0]:
                    self._latest = None, None  # frees the old table before the new one is locked
                    with suppress(MemoryError, RuntimeError):  # the next lookup tries again
                        self._latest = key, _readable(table, device)
        found, view = self._latest
        return view if key == found else None

    @property
    def nbytes(self) -> int | None:
        """Page-locked bytes; 0 before the first lookup, ``None`` if the GPU cannot read them."""
        key, view = self._latest
        if view is None:
            return 0 if key is None else None
        return int(view.nbytes)


def in_place_of(hook: Any, name: str = "weight") -> InPlace | None:
    """The in-place reader of a weight that a hook offloads; ``None`` if it is on disk."""
    if host_tensor(hook.weights_map, name) is None:
        return None
    return attached(hook, f"_in_place_{name}", InPlace)  # type: ignore[no-any-return]


def _readable(table: Any, device: Any) -> Any | None:
    import torch

    if device.type != "cuda" or not table.is_contiguous():
        return None
    with torch.inference_mode(mode=False), torch.no_grad():
        locked = table.detach()
        if not (_READABLE_IN_PLACE and page_lock(locked, device)):
            _warn_pageable(table.nbytes)
            return None
        view = on_gpu(locked, device)
        return None if view is None else view.view(table.dtype).view(table.shape)


def on_gpu(locked: Any, device: Any) -> Any | None:
    """The bytes of page-locked memory as a tensor on a GPU; ``None`` if it is another GPU's."""
    import torch

    if not _READABLE_IN_PLACE:
        return None
    with torch.inference_mode(mode=False), torch.no_grad():
        view = torch.as_tensor(_OnGpu(locked))
    return view if view.device == device else None


class _OnGpu:
    """Page-locked memory for ``torch.as_tensor``, whose result keeps this object alive."""

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
def _warn_pageable(size: int) -> None:
    logger.warning(
        "%.1f GiB of embeddings on the CPU cannot be page-locked, so the GPU cannot read them in "
        "place.  Each lookup waits for the CPU, and decode steps are not captured as CUDA graphs.",
        size / 2**30,
    )
