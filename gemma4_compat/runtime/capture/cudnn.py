"""Which kernels PyTorch's attention may use, and forwards without cuDNN's.

PyTorch's flags belong to the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...objects import ForkableLock

_lock = ForkableLock()
#: The forwards that do not use cuDNN now, and what PyTorch's flag was before the first.
_inside: list[object] = []
_before = True


def is_allowed() -> bool:
    """Whether users let PyTorch use cuDNN; a forward ``without_cudnn`` in a thread is no change."""
    import torch

    with _lock.now:
        return _before if _inside else bool(torch.backends.cuda.cudnn_sdp_enabled())


def allowed_kernels() -> tuple[Any, ...]:
    """Which of its kernels PyTorch's attention may use, and which it prefers."""
    import torch

    cuda = torch.backends.cuda
    order: tuple[Any, ...] = getattr(torch._C, "_get_sdp_priority_order", tuple)()
    enabled = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return *enabled, is_allowed(), *order


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Let PyTorch choose another kernel than cuDNN's; threads may leave in any order.

    Forwards of other threads do without cuDNN meanwhile: their results differ by rounding.
    """
    import torch

    global _before
    forward = object()
    try:
        with _lock.now:
            if not _inside:
                _before = torch.backends.cuda.cudnn_sdp_enabled()
            _inside.append(forward)
            torch.backends.cuda.enable_cudnn_sdp(False)
        yield
    finally:
        with _lock.now:
            if forward in _inside:
                _inside.remove(forward)
                if not _inside:
                    torch.backends.cuda.enable_cudnn_sdp(_before)
