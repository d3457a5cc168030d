"""Turns queries or keys by their position in one kernel (``rotary.cu``).

transformers needs five kernels and four views for it.  The kernel rounds as each of them does, so
its output equals theirs bit for bit.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from . import compiler
from .launch import Launcher
from .replacing import ALIGNMENT, as_current, dtypes, plain, raw_stream
from .trials import pattern, require_equal

LAUNCHER = Launcher("rotary", "transformers computes the rotary embedding in its own kernels")
_FILE = Path(__file__).with_suffix(".cu")
_THREADS = 256
_VALUES = 8  # of a thread
_MOST = 1 << 31  # values


def in_one_kernel(original: Any) -> Any:
    """A function that uses the kernel where it can.

    Args:
        original: A function such as ``apply_rotary_pos_emb`` of Gemma 4.
    """
    import torch

    is_plain, stream_of = plain(), raw_stream()
    namespace = original.__globals__
    half = namespace.get("rotate_half")
    code = getattr(half, "__code__", None)
    Tensor, empty_like = torch.Tensor, torch.empty_like

    def output(x: Any, cos: Any, sin: Any, index: int) -> Any:
        """Of plain inputs with heads in dimension 2; ``None`` if the kernel cannot compute it."""
        shape, angles, dtype = x.shape, cos.shape, x.dtype
        if len(shape) != 4 or len(angles) != 3 or sin.shape != angles:
            return None
        batch, length, heads, size = shape
        rows = angles[0]
        if angles[1] != length or angles[2] != size or (rows != batch and rows != 1):
            return None
        if cos.dtype is not dtype or sin.dtype is not dtype or size % _VALUES:
            return None
        if cos.get_device() != index or sin.get_device() != index:
            return None
        if not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
            return None
        pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
        count = batch * length * heads * size
        if not 0 < count < _MOST or (pointers[0] | pointers[1] | pointers[2]) % ALIGNMENT:
            return None
        if namespace.get("rotate_half") is not half or getattr(half, "__code__", None) is not code:
            return None  # the user's code runs
        key = original, index, dtype, size
        launch = LAUNCHER.compared(key, x.device, _equal_launch, original, x)
        if launch is None:
            return None
        count //= _VALUES
        sizes = count, size // _VALUES, heads, rows * length
        try:
            out, blocks = empty_like(x), -(-count // _THREADS)
            launch(blocks, stream_of(index), out.data_ptr(), *pointers, *sizes)
        except Exception as error:  # the original raises it, too, or needs less memory
            return LAUNCHER.failed(key, x.device, error)
        return out

    @wraps(original)
    def apply_rotary_pos_emb(x: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        out = None
        if (
            is_plain(x)
            and unsqueeze_dim == 2
            and type(cos) is Tensor
            and type(sin) is Tensor
            and not cos.is_neg()
            and not sin.is_neg()
        ):
            index = x.get_device()
            with as_current(index):
                out = output(x, cos, sin, index)
        return original(x, cos, sin, unsqueeze_dim) if out is None else out

    return apply_rotary_pos_emb


def _equal_launch(original: Any, inputs: Any) -> Any:
    """The launch whose outputs equal the original's; ``None`` for another dtype."""
    import torch

    device, size, dtype = inputs.device, inputs.shape[-1], inputs.dtype
    if dtype not in dtypes():
        return None
    kernel = compiler.compiled(_FILE, "rotary", device, INPUT=dtypes()[dtype])
    launch = compiler.launcher(kernel, 8, (), (_THREADS, 1), early=True)
    shapes = enumerate(((2, 8, 4, size), (1, 8, size), (1, 8, size)))
    trial = [2 * pattern(shape, dtype, device, seed) for seed, shape in shapes]
    out = torch.full_like(trial[0], float("nan"))
    pointers = [tensor.data_ptr() for tensor in (out, *trial)]
    count, stream = out.numel() // _VALUES, raw_stream()(inputs.get_device())
    launch(-(-count // _THREADS), stream, *pointers, count, size // _VALUES, 4, 8)
    require_equal(out, original(*trial, 2))
    return launch
