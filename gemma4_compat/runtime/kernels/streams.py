"""Runs kernels of a captured step beside other kernels.

A CUDA graph records which kernels wait for which.  Kernels on another stream wait only for what was
on the first stream when they were forked from it, until both are joined.  The kernels of one token
are small, so that two of them fit on the GPU at a time.
"""

from __future__ import annotations

from functools import cache
from typing import Any


def is_capturing(device: Any) -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    import torch

    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


class Fork:
    """Kernels on a side stream.

    Example::

        with Fork(device) as fork:
            small = table.index_select(0, indices)
        large = matrix.index_select(0, indices)
        fork.join()

    Until ``join``, the current stream must not use what the side stream writes, and the tensors
    that the side stream reads must stay alive.

    Outside a capture all kernels stay on the current stream.  There, PyTorch's allocator would give
    the memory of a side stream to the next fork, which may belong to another thread.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.main: Any = None
        self.side: Any = None

    def __enter__(self) -> Fork:
        import torch

        if is_capturing(self.device):
            self.main = torch.cuda.current_stream(self.device)
            self.side = _side_stream(self.device)
            self.side.wait_stream(self.main)
            torch.cuda.set_stream(self.side)
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        if self.main is not None:
            torch.cuda.set_stream(self.main)

    def join(self) -> None:
        """Let the current stream wait for the side stream."""
        if self.main is not None:
            self.main.wait_stream(self.side)


@cache
def _side_stream(device: Any) -> Any:
    """One stream for all forks, because cuBLAS keeps 32 MiB for each stream."""
    import torch

    return torch.cuda.Stream(device)
