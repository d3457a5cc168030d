"""Computes an RMS norm in one kernel (``rms_norm.cu``).

transformers computes it in nine kernels.  For few tokens each of them takes longer to start than to
run: a token of E2B has 242 norms.  For many tokens, each of them reads and writes all values in
float32.

The kernel's output equals that of the nine bit for bit, because it adds the squares in the same
order.  PyTorch does not document that order.  So the kernel is compared with the norm itself,
before its first use for norms and inputs of a kind: in float32, where another order shows, and in
the dtype of the input.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from . import compiler
from .launch import Launcher
from .replacing import current_device, dtypes, plain, raw_stream
from .trials import pattern, require_equal

LAUNCHER = Launcher("rms_norm", "transformers computes RMS norms in its own kernels")
_WARP = 32
_MAX_THREADS = 512  # of a block in PyTorch's reductions
_FILE = Path(__file__).with_suffix(".cu")
#: PyTorch adds longer rows in another order.
_SIZES = range(4 * _WARP, 15 * _MAX_THREADS + 1, 4)
#: PyTorch adds the rows of this number and of all larger ones in the same order (``_threads``).
_MANY_ROWS = _MAX_THREADS // _WARP
_ROWS_IN_BLOCK = 4  # if a warp computes a row
_TRIALS = 8
_ALIGNMENT = 16  # bytes of the longest load
_VALUES = 1 << 19  # of the trial with most rows


class _Launch:
    """How the kernel is launched for one kind of norms and inputs."""

    def __init__(self, kernel: compiler.Kernel, rows: int, size: int, eps: float) -> None:
        threads = _threads(rows, size // 4)
        self.rows_in_block = _ROWS_IN_BLOCK if threads == _WARP else 1
        numbers = size // 4, 1 / size, eps
        self.launch = compiler.launcher(kernel, 4, numbers, (threads, self.rows_in_block))
        # PyTorch's factor is the number of rows divided by that of values, both in float32.
        self.most_rows = (1 << 24) // (size // (size & -size))


def in_one_kernel(original: Any) -> Any:
    """The forward of an RMS norm that uses the kernel where it can.

    Args:
        original: The forward of a class such as ``Gemma4RMSNorm``.
    """
    import torch
    from torch.nn import Parameter

    is_plain, get_device, stream_of = plain(), current_device(), raw_stream()
    known, Tensor, empty_like = LAUNCHER.kinds, torch.Tensor, torch.empty_like

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
        key = original, cls, cls._norm, index, inputs.dtype, dtype, size, eps, few.bit_length()
        kind = known.get(key)
        if kind is None:
            compare = key, inputs.device, _equal_kind, original, self, inputs, weight
            kind = LAUNCHER.get(key, inputs.device, LAUNCHER.checked, *compare)
        if kind is None or rows > kind.most_rows:
            return None
        try:
            out, blocks = empty_like(inputs), -(-rows // kind.rows_in_block)
            kind.launch(blocks, stream_of(index), out.data_ptr(), pointer, weights, rows)
        except Exception as error:  # the original raises it, too, or needs less memory
            return LAUNCHER.failed(key, inputs.device, error)
        return out

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


def _equal_kind(original: Any, module: Any, inputs: Any, weight: Any) -> _Launch | None:
    """The kind whose outputs equal those of a norm bit for bit; ``None`` if it computes none."""
    import torch

    size, device, numbers = inputs.shape[-1], inputs.device, {None: 0, **dtypes()}
    dtype, weights = (None, 0) if weight is None else (weight.dtype, weight.data_ptr())
    if size not in _SIZES or not {inputs.dtype, dtype} <= numbers.keys() or not inputs.numel():
        return None
    if getattr(module, "weight", None) is not weight:  # a user's class may have such a property
        return None
    stream, rows = raw_stream()(inputs.get_device()), min(inputs.numel() // size, _MANY_ROWS)
    rows = 1 << (rows.bit_length() - 1)
    counts = enumerate((*_TRIALS * [rows], _VALUES // size))
    trials = [4 * pattern((count, size), torch.float32, device, seed) for seed, count in counts]

    def kind_of(count: int, of: Any, halving: bool) -> _Launch:
        constants = {"INPUT": numbers[of], "WEIGHT": numbers[dtype], "HALVING": int(halving)}
        constants["THREADS"] = _MAX_THREADS
        kernel = compiler.compiled(_FILE, "rms_norm", device, **constants)
        return _Launch(kernel, count, size, module.eps)

    def compare(trial: Any, halving: bool) -> None:
        count, out = len(trial), torch.full_like(trial, float("nan"))
        kind = kind_of(count, trial.dtype, halving)
        pointers = out.data_ptr(), trial.data_ptr(), weights, count
        kind.launch(-(-count // kind.rows_in_block), stream, *pointers)
        require_equal(out, original(module, trial))

    for halving in (True, False):
        try:
            for of in (torch.float32, inputs.dtype):
                for trial in trials:
                    compare(trial.to(of), halving)
        except compiler.KernelError:
            if not halving:
                raise
        else:
            break
    return kind_of(rows, inputs.dtype, halving)


def _threads(rows: int, fours: int) -> int:
    """The threads that add one row in PyTorch (``set_block_dimension`` in Reduce.cuh)."""
    width, height = (min(1 << (n.bit_length() - 1), _MAX_THREADS) for n in (fours, rows))
    height = min(height, _MAX_THREADS // min(width, _WARP))
    return min(width, _MAX_THREADS // height)
