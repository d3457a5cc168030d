"""Computes an RMS norm in one kernel (``rms_norm.cu``).

transformers computes it in nine kernels, and its gradient in fourteen.  For few tokens each of them
takes longer to start than to run: a token of E2B has 242 norms.  For many tokens, each of them
reads and writes all values in float32.

The kernel's output equals that of the nine bit for bit, because it adds the squares in the same
order.  PyTorch does not document that order.  So the kernel is compared with the norm itself,
before its first use for norms and inputs of a kind: in float32, where another order shows, and in
the dtype of the input.  The kernel of the gradient (``rms_norm_gradient.py``) likewise.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Launch:
    """How a kernel is launched for one kind of norms and inputs; ``passed`` are its pointers."""

    def __init__(
        self, kernel: compiler.Kernel, rows: int, size: int, eps: float, passed: int
    ) -> None:
        threads = _threads(rows, size // 4)
        self.rows_in_block = _ROWS_IN_BLOCK if threads == _WARP else 1
        numbers = size // 4, 1 / size, eps
        self.launch = compiler.launcher(kernel, passed, numbers, (threads, self.rows_in_block))
        # PyTorch's factor is the number of rows divided by that of values, both in float32.
        self.most_rows = (1 << 24) // (size // (size & -size))

    def __call__(self, stream: int, rows: int, *pointers: int) -> None:
        self.launch(-(-rows // self.rows_in_block), stream, *pointers, rows)


def in_one_kernel(original: Any) -> Any:
    """The forward of an RMS norm that uses the kernel where it can.

    Args:
        original: The forward of a class such as ``Gemma4RMSNorm``.
    """
    import torch
    from torch.nn import Parameter

    from .rms_norm_gradient import with_gradient

    is_plain, is_trained = plain(), plain(gradients=True)
    get_device, stream_of = current_device(), raw_stream()
    known, Tensor, empty_like = LAUNCHER.kinds, torch.Tensor, torch.empty_like

    def output(self: Any, inputs: Any, index: int, trained: bool) -> Any:
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
        if trained and (inputs.requires_grad or (weight is not None and weight.requires_grad)):
            return differentiable(self, inputs, weight, key)
        kind = known.get(key)
        if kind is None:
            compare = key, inputs.device, _equal_kind, original, self, inputs, weight
            kind = LAUNCHER.get(key, inputs.device, LAUNCHER.checked, *compare)
        if kind is None or rows > kind.most_rows:
            return None
        try:
            out = empty_like(inputs)
            kind(stream_of(index), rows, out.data_ptr(), pointer, weights)
        except Exception as error:  # the original raises it, too, or needs less memory
            return LAUNCHER.failed(key, inputs.device, error)
        return out

    differentiable = with_gradient(original)

    @wraps(original)
    def forward(self: Any, hidden_states: Any) -> Any:
        out, trained = None, False
        if is_plain(hidden_states) or (trained := is_trained(hidden_states)):
            index = hidden_states.get_device()
            if get_device() == index:
                out = output(self, hidden_states, index, trained)
            else:
                with torch.cuda.device(index):
                    out = output(self, hidden_states, index, trained)
        return original(self, hidden_states) if out is None else out

    return forward


def _equal_kind(original: Any, module: Any, inputs: Any, weight: Any) -> Launch | None:
    """The kind whose outputs equal those of a norm bit for bit; ``None`` if it computes none."""
    import torch

    stream = raw_stream()(inputs.get_device())

    def compare(kind: Launch, trial: Any, weights: int) -> None:
        out = torch.full_like(trial, float("nan"))
        kind(stream, len(trial), out.data_ptr(), trial.data_ptr(), weights)
        require_equal(out, original(module, trial))

    kinds = compared(module, inputs, weight, {"rms_norm": 4}, compare)
    return None if kinds is None else kinds[0]


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
    rows = min(inputs.numel() // size, _MANY_ROWS)
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
