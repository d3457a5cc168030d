"""Launches the kernels of RMS norms (``rms_norm.cu``), after a comparison with the norms.

The kernels' values equal those of PyTorch bit for bit, because they add in the same order.  PyTorch
does not document that order.  So the kernels are compared with the norm itself, before their first
use for norms and inputs of a kind: in float32, where another order shows, and in the dtype of the
input.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import compiler
from .launch import Launcher
from .replacing import dtypes
from .trials import pattern

LAUNCHER = Launcher("rms_norm", "transformers computes RMS norms in its own kernels")
_WARP = 32
_MAX_THREADS = 512  # of a block in PyTorch's reductions
_FILE = Path(__file__).with_name("rms_norm.cu")
#: PyTorch adds longer rows in another order.
_SIZES = range(4 * _WARP, 15 * _MAX_THREADS + 1, 4)
#: PyTorch adds the rows of this number and of all larger ones in the same order (``_threads``).
MANY_ROWS = _MAX_THREADS // _WARP
#: The kernel of a norm, and how many pointers and numbers it gets.
NORM = {"rms_norm": 8}
_ROWS_IN_BLOCK = 4  # if a warp computes a row
_TRIALS = 8
_VALUES = 1 << 19  # of the trial with most rows


class Launch:
    """How a kernel is launched for one kind of norms and inputs; ``passed`` are its pointers.

    A call leaves out the last pointers if they are null.
    """

    def __init__(
        self, kernel: compiler.Kernel, rows: int, size: int, eps: float, passed: int
    ) -> None:
        threads = _threads(rows, size // 4)
        self.rows_in_block = _ROWS_IN_BLOCK if threads == _WARP else 1
        numbers = size // 4, 1 / size, eps
        self.passed, block = passed, (threads, self.rows_in_block)
        self.launch = compiler.launcher(kernel, passed, numbers, block, early=True)
        # PyTorch's factor is the number of rows divided by that of values, both in float32.
        self.most_rows = (1 << 24) // (size // (size & -size))

    def __call__(self, stream: int, rows: int, *pointers: int) -> None:
        nulls = (self.passed - 1 - len(pointers)) * (0,)
        self.launch(-(-rows // self.rows_in_block), stream, *pointers, *nulls, rows)


def compared(
    module: Any,
    inputs: Any,
    weight: Any,
    kernels: dict[str, int],
    compare: Callable[..., None],
    read: Any = None,
) -> list[Launch] | None:
    """The kinds of kernels for these inputs, after comparisons; ``None`` if they compute none.

    Args:
        kernels: Their names, and how many pointers and numbers each of them gets.
        compare: Raises a ``KernelError`` if the kinds that it gets compute anything else for a
            trial than the original.  It gets a pointer to the weight as well.
        read: The dtype that the kernels read; by default that of the inputs.
    """
    import torch

    size, device, numbers = inputs.shape[-1], inputs.device, {None: 0, **dtypes()}
    dtype, weights = (None, 0) if weight is None else (weight.dtype, weight.data_ptr())
    if size not in _SIZES or not {inputs.dtype, dtype} <= numbers.keys() or not inputs.numel():
        return None
    if getattr(module, "weight", None) is not weight:  # a user's class may have such a property
        return None
    rows = min(inputs.numel() // size, MANY_ROWS)
    rows = 1 << (rows.bit_length() - 1)
    counts = enumerate((*_TRIALS * [rows], _VALUES // size))
    trials = [4 * pattern((count, size), torch.float32, device, seed) for seed, count in counts]

    def kinds_of(count: int, of: Any, halving: bool) -> list[Launch]:
        constants = {"INPUT": numbers[read or of], "OUTPUT": numbers[of], "WEIGHT": numbers[dtype]}
        constants |= {"HALVING": int(halving), "THREADS": _MAX_THREADS}
        return [
            Launch(
                compiler.compiled(_FILE, n, device, **constants), count, size, module.eps, passed
            )
            for n, passed in kernels.items()
        ]

    for halving in (True, False):
        try:
            for of in (torch.float32, inputs.dtype):
                for trial in trials:
                    compare(*kinds_of(len(trial), of, halving), trial.to(of), weights)
        except compiler.KernelError:
            if not halving:
                raise
        else:
            break
    return kinds_of(rows, inputs.dtype, halving)


def _threads(rows: int, fours: int) -> int:
    """The threads that add one row in PyTorch (``set_block_dimension`` in Reduce.cuh)."""
    width, height = (min(1 << (n.bit_length() - 1), _MAX_THREADS) for n in (fours, rows))
    height = min(height, _MAX_THREADS // min(width, _WARP))
    return min(width, _MAX_THREADS // height)
