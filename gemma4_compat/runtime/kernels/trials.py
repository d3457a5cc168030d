"""Inputs and conditions with which a kernel is compared with the original."""

from __future__ import annotations

import math
from typing import Any

from .compiler import KernelError

_MORE = 1.5  # times the original's error
_LEAST = 16 * 2.0**-23  # of the result: sums in float32 may differ by this


def pattern(shape: tuple[int, ...], dtype: Any, device: Any, seed: int = 0) -> Any:
    """Values from -1 to 1 in no order, always the same; no generator of random numbers is used."""
    import torch

    numbers = torch.arange(math.prod(shape), dtype=torch.float64, device=device)
    numbers.add_(1000 * seed).mul_(12.9898).sin_().mul_(43758.5453).remainder_(2).sub_(1)
    return numbers.view(shape).to(dtype)


def values_of(packed: Any, code: Any, maxima: Any) -> Any:
    """The values in float64 that rows in 4 bits stand for, without rounding.

    Args:
        packed: [..., columns / 2] in uint8.
        code: [16].
        maxima: [..., columns / blocksize].
    """
    import torch

    numbers = torch.stack([packed >> 4, packed & 15], -1).view(*maxima.shape, -1)
    return (code.double()[numbers.int()] * maxima.double()[..., None]).flatten(-2)


def maxima_of(count: int, device: Any, code: Any = None) -> tuple[tuple[Any, ...], Any]:
    """The tensors of the maxima of blocks, and their values [count] in float32.

    Args:
        count: of the blocks.
        device: of the tensors.
        code: of nested maxima in 8 bits, [256]; ``None`` if they are not nested.
    """
    import torch

    values = 1 + pattern((count,), torch.float32, device, 3) / 2
    if code is None:
        return (values,), values
    numbers = (values * 128).to(torch.uint8)
    outer = 1 + pattern((-(-count // 256),), torch.float32, device, 4) / 2
    offset = pattern((), torch.float32, device, 5) + 2
    values = code[numbers.int()] * outer.repeat_interleave(256)[:count]
    return (numbers, code, outer, offset), values + offset


def require_equal(found: Any, original: Any) -> None:
    """Raise a ``KernelError`` if two tensors differ in any bit."""
    import torch

    if not torch.equal(found, original):
        raise KernelError("its outputs differ from the original's")


def require_near(found: Any, original: Any, exact: Any) -> None:
    """Raise a ``KernelError`` if a result is much less exact than the original's.

    Args:
        found: The kernel's result.
        original: The original's, of the same shape.
        exact: The same in float64.
    """
    size = float(exact.norm())
    own, theirs = (float((each.double() - exact).norm()) / size for each in (found, original))
    if not own <= _MORE * theirs + _LEAST:
        raise KernelError(f"its relative error is {own:.2g}, and the original's {theirs:.2g}")
