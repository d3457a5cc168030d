"""Computes an RMS norm in one kernel (``rms_norm.cu``).

transformers computes it in nine kernels.  For few tokens each of them takes longer to start than to
run: a token of E2B has 242 norms.  For many tokens, each of them reads and writes all values in
float32.

The kernel's output equals that of the nine bit for bit, because it adds the squares in the same
order.  PyTorch does not document that order.  So the kernel is compared with the norm itself on
random inputs, before its first use for norms and inputs of a kind: in float32, where another order
shows, and in the dtype of the input.  If an output differs, the norm stays as it is.
"""

from __future__ import annotations

import logging
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .replacing import Compared, current_device, dtypes, kernel_of, plain, raw_stream

if TYPE_CHECKING:
    from .compiler import Kernel

logger = logging.getLogger(__name__)

_WARP = 32
_MAX_THREADS = 512  # of a block in PyTorch's reductions
_FILE, _MOST = Path(__file__).with_suffix(".cu"), ("THREADS", _MAX_THREADS)
#: PyTorch adds longer rows in another order.
_SIZES = range(4 * _WARP, 15 * _MAX_THREADS + 1, 4)
#: PyTorch adds the rows of this number and of all larger ones in the same order (``_threads``).
_MANY_ROWS = _MAX_THREADS // _WARP
_ROWS_IN_BLOCK = 4  # if a warp computes a row
_TRIALS = 8
_ALIGNMENT = 16  # bytes of the longest load
_VALUES = 1 << 19  # of the trial with most rows


class _Kind:
    """How the kernel is launched for one kind of norms and inputs."""

    def __init__(self, kernel: Kernel, rows: int, size: int, eps: float) -> None:
        from .compiler import launcher

        threads = _threads(rows, size // 4)
        self.rows_in_block = _ROWS_IN_BLOCK if threads == _WARP else 1
        numbers = size // 4, 1 / size, eps
        self.launch = launcher(kernel, 4, numbers, (threads, self.rows_in_block))
        # PyTorch's factor is the number of rows divided by that of values, both in float32.
        self.most_rows = (1 << 24) // (size // (size & -size))


def in_one_kernel(original: Any) -> Any:
    """The forward of an RMS norm that uses the kernel where it can.

    Args:
        original: The forward of a class such as ``Gemma4RMSNorm``.
    """
    import torch
    from torch.nn import Parameter

    compared, is_plain, get_device, stream_of = Compared(), plain(), current_device(), raw_stream()
    known, Tensor, empty_like = compared.kinds, torch.Tensor, torch.empty_like
    OutOfMemory = torch.cuda.OutOfMemoryError

    def output(self: Any, inputs: Any, index: int) -> Any:
        """The norm of a plain tensor on this GPU; ``None`` if the kernel does not compute it."""
        own, shape = self.__dict__, inputs.shape
        eps = own.get("eps")
        size = shape[-1] if shape else 0
        if not size or type(eps) is not float or "_norm" in own or not inputs.is_contiguous():
            return None
        weight = dtype = None
        pointer, weights = inputs.data_ptr(), 0
        if self.with_scale:
            weight = self._parameters.get("weight")
            if type(weight) is not Parameter and type(weight) is not Tensor:
                return None
            if weight.get_device() != index or weight.numel() != size or weight.dim() != 1:
                return None
            if not weight.is_contiguous():
                return None
            dtype, weights = weight.dtype, weight.data_ptr()
        if (pointer | weights) % _ALIGNMENT:
            return None
        rows, cls = inputs.numel() // size, type(self)
        few = rows if rows < _MANY_ROWS else _MANY_ROWS
        key = cls, cls._norm, index, inputs.dtype, dtype, size, eps, few.bit_length()
        kind = known.get(key)
        if kind is None:
            kind = compared.get(key, inputs.device, _equal_kind, original, self, inputs, weight)
        if kind is None or rows > kind.most_rows:
            return None
        try:
            out = empty_like(inputs)
        except OutOfMemory:  # the original raises it, or needs less
            return None
        blocks = -(-rows // kind.rows_in_block)
        done = kind.launch(blocks, stream_of(index), out.data_ptr(), pointer, weights, rows)
        return out if done else None

    @wraps(original)
    def forward(self: Any, hidden_states: Any) -> Any:
        out = None
        if is_plain(hidden_states):
            index = hidden_states.get_device()
            if get_device() == index:
                out = output(self, hidden_states, index)
            else:
                with torch.cuda.device(index):
                    out = output(self, hidden_states, index)
        return original(self, hidden_states) if out is None else out

    return forward


def _equal_kind(original: Any, module: Any, inputs: Any, weight: Any) -> _Kind | None:
    """The kind whose outputs equal those of a norm bit for bit; ``None`` if there is none."""
    import torch

    size, device, numbers = inputs.shape[-1], inputs.device, {None: 0, **dtypes()}
    dtype, weights = (None, 0) if weight is None else (weight.dtype, weight.data_ptr())
    if size not in _SIZES or not {inputs.dtype, dtype} <= numbers.keys() or not inputs.numel():
        return None
    if getattr(module, "weight", None) is not weight:  # a user's class may have such a property
        return None
    stream, rows = raw_stream()(inputs.get_device()), min(inputs.numel() // size, _MANY_ROWS)
    rows = 1 << (rows.bit_length() - 1)
    generator = torch.Generator(device).manual_seed(0)
    trials = [
        4 * torch.randn(count, size, generator=generator, device=device)
        for count in (*_TRIALS * [rows], _VALUES // size)
    ]

    def kind_of(count: int, of: Any, halving: bool) -> _Kind | None:
        constants = {"INPUT": numbers[of], "WEIGHT": numbers[dtype], "HALVING": int(halving)}
        kernel = kernel_of(_FILE, (*constants.items(), _MOST), device, _MAX_THREADS)
        return None if kernel is None else _Kind(kernel, count, size, module.eps)

    def is_equal(trial: Any, halving: bool) -> bool:
        count, out = len(trial), torch.empty_like(trial)
        kind = kind_of(count, trial.dtype, halving)
        if kind is None:
            return False
        blocks, pointers = -(-count // kind.rows_in_block), (out.data_ptr(), trial.data_ptr())
        done = kind.launch(blocks, stream, *pointers, weights, count)
        return done and torch.equal(out, original(module, trial))

    for halving in (True, False):
        if all(is_equal(t.to(d), halving) for d in (torch.float32, inputs.dtype) for t in trials):
            return kind_of(rows, inputs.dtype, halving)
    name = type(module).__name__
    logger.info("%s of %s values stays as it is: its outputs would differ", name, size)
    return None


def _threads(rows: int, fours: int) -> int:
    """The threads that add one row in PyTorch (``set_block_dimension`` in Reduce.cuh)."""
    width, height = (min(1 << (n.bit_length() - 1), _MAX_THREADS) for n in (fours, rows))
    height = min(height, _MAX_THREADS // min(width, _WARP))
    return min(width, _MAX_THREADS // height)
