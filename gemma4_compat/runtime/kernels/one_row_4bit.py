"""The product of one row of inputs and a weight in 4 bits, in one-token forwards.

For one row, bitsandbytes' kernel takes several times as long as the memory needs.  This kernel
(``one_row_4bit.cu``) has more loads on their way at a time.  It reads the same packed values and
maxima, multiplies them in float32, and rounds once.  bitsandbytes rounds the code, the maximum and
their product to the dtype of the inputs before that, so this kernel is the more exact one.

The order of its additions depends on the shape of the weight only: the outputs of an eager and of a
captured step are equal bit for bit.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...model.parts import is_ours
from .compiler import KernelError, compiled, exponents
from .step import is_short_of_memory
from .watch import is_of_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from .compiler import Kernel

logger = logging.getLogger(__name__)

_thread = threading.local()  # .launch: the ``_Launch`` of this thread's one-token forward

_LANES = 16  # threads that share rows
_VECTOR = 32  # values
_NESTED_BLOCK = 256
#: How many threads of a multiprocessor one row for each thread takes, at most, for so many rows.
_ROWS = ((1, 1750), (2, 5000), (4, None))
_THREADS = 384  # of a block, about
_BLOCKS = 4  # of a multiprocessor, at most
_SHARED = 48 << 10, 96 << 10  # bytes of a block


class _Launch:
    """The parameters of a launch, in memory that is used again."""

    _LAYOUT = struct.Struct("8Q4I")

    def __init__(self, patch: object = None) -> None:
        self.patch = patch
        self.values = ctypes.create_string_buffer(self._LAYOUT.size)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.values))

    def fill(self, *values: int) -> Any:
        self._LAYOUT.pack_into(self.values, 0, *values)
        return self.pointers


class _Plan(NamedTuple):
    """How the kernel multiplies with weights of one shape."""

    kernel: Kernel
    grid: tuple[int, int]
    threads: int
    shared: int
    splits: int
    shift: int


def in_forward(patch: object) -> Callable[..., Any]:
    """What a patch puts in place of a text model's forward.

    With one token, this thread multiplies in the kernel, by this patch's ``matmul``.
    """

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if (
            torch.compiler.is_compiling()
            or not _is_one_token(*args, **kwargs)
            or not is_ours(self)
            or torch.jit.is_tracing()
        ):
            return original(self, *args, **kwargs)
        outside = getattr(_thread, "launch", None)
        try:
            _thread.launch = _Launch(patch)
            return original(self, *args, **kwargs)
        finally:
            _thread.launch = outside

    return forward


def _is_one_token(input_ids: Any = None, *_: Any, inputs_embeds: Any = None, **others: Any) -> bool:
    import torch

    inputs = inputs_embeds if input_ids is None else input_ids
    if not isinstance(inputs, torch.Tensor) or inputs.ndim < 1:
        return False
    return bool(inputs.numel() == (inputs.shape[-1] if input_ids is None else 1))


def matmul(patch: object) -> Callable[..., Any]:
    """What a patch puts in place of ``bitsandbytes.matmul_4bit``.

    In a one-token forward, the kernel multiplies if it can.  A hook of accelerate keeps calling
    the patch's forward after the patch is disabled, so another patch must not multiply for it.
    """

    def multiply(original: Any, A: Any, B: Any, quant_state: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if not (torch.compiler.is_compiling() or args or kwargs.get("bias") is not None):
            launch = getattr(_thread, "launch", None)
            if launch is not None and launch.patch is patch and kwargs.get("out") is None:
                output = product(launch, A, B, quant_state)
                if output is not None:
                    return output
        return original(A, B, quant_state, *args, **kwargs)

    return multiply


def product(launch: _Launch, inputs: Any, weight: Any, state: Any) -> Any:
    """The product, or ``None`` if the kernel cannot compute it.

    Args:
        launch: Of this thread.
        inputs: [..., inputs of the layer], one row in all; bfloat16, float16, float32.
        weight: The packed values of [outputs, inputs], of any dtype and shape.
        state: The ``QuantState`` of the weight.
    """
    try:
        return _product(launch, inputs, weight, state)
    except Exception as error:  # bitsandbytes computes it, or raises its own error
        if is_of_user(error):
            raise
        logger.debug("bitsandbytes multiplies", exc_info=error)
        return None


def _product(launch: _Launch, inputs: Any, weight: Any, state: Any) -> Any:
    import torch

    if type(inputs) is not torch.Tensor or not inputs.is_cuda or inputs.requires_grad:
        return None
    (outputs, size), device, nested = state.shape, inputs.get_device(), state.nested
    if not size == inputs.shape[-1] == inputs.numel() or not inputs.is_contiguous():
        return None
    plan = _plan(device, inputs.dtype, outputs, size, bool(nested), state.blocksize)
    if plan is None:
        return None
    code, maxima = state.code, state.absmax
    floats: tuple[Any, ...] = (code, maxima)
    second: tuple[Any, ...] = ()
    if nested:
        if state.state2.blocksize != _NESTED_BLOCK or maxima.dtype is not torch.uint8:
            return None
        second = state.state2.code, state.state2.absmax, state.offset
        floats = code, *second
    for each in floats:
        if each.get_device() != device or each.dtype is not torch.float32:
            return None
    at = inputs.data_ptr()
    packed = weight.data_ptr()
    if (
        (at | packed) % 16
        or 2 * weight.numel() * weight.itemsize != outputs * size
        or maxima.numel() * state.blocksize != outputs * size
        or weight.get_device() != device
        or maxima.get_device() != device
        or code.numel() != 16
        or not weight.is_contiguous()
    ):
        return None
    out = inputs.new_empty((*inputs.shape[:-1], outputs))
    values = launch.fill(
        out.data_ptr(), at, packed, maxima.data_ptr(), code.data_ptr(),
        *([each.data_ptr() for each in second] or (0, 0, 0)),
        outputs, size // _VECTOR, plan.splits, plan.shift,
    )  # fmt: skip
    stream = torch._C._cuda_getCurrentRawStream(device)
    how = plan.grid, plan.threads, plan.shared, stream, values
    if torch.cuda.current_device() == device:
        plan.kernel.launch(*how)
    else:
        with torch.cuda.device(device):
            plan.kernel.launch(*how)
    return out


_plans: dict[tuple[Any, ...], _Plan | None] = {}


def _plan(*key: Any) -> _Plan | None:
    """The plan for (device, dtype, outputs, inputs, nested, blocksize); ``None`` if there is none.

    In a capture, no kernel is compiled.
    """
    try:
        return _plans[key]
    except KeyError:
        pass
    import torch

    if torch.cuda.is_current_stream_capturing():
        return None
    try:
        plan = _new_plan(*key)
    except KernelError as error:
        if is_short_of_memory(error):
            return None
        plan = None
        _say_without(key[0], str(error))
    _plans[key] = plan
    return plan


@cache
def _say_without(device: int, why: str) -> None:
    logger.info("bitsandbytes' kernel multiplies with weights in 4 bits on GPU %d: %s", device, why)


def _new_plan(
    device: int, dtype: Any, outputs: int, size: int, nested: bool, blocksize: int
) -> _Plan | None:
    """The plan for weights of this shape.

    Raises:
        KernelError: This machine cannot compile the kernel.
    """
    import torch

    vectors, shift = size // _VECTOR, (blocksize // _VECTOR).bit_length() - 1
    each = 1 if vectors <= 512 else 3  # vectors of a thread in a row
    splits = -(-vectors // (_LANES * each))
    parts = max(1, _THREADS // (splits * _LANES))
    splits += parts * splits % 2  # whole warps
    threads = parts * splits * _LANES
    most = 512 if threads <= 512 else 1024
    count = torch.cuda.get_device_properties(device).multi_processor_count
    share = outputs * splits * _LANES / count
    rows = next(rows for rows, limit in _ROWS if limit is None or share <= limit)
    if each > 1:
        rows = 2
    chunks = dtype.itemsize * _VECTOR // 16 * ((vectors + 5) // 8 * 8 + 2)
    shared = 4096 + 1024 * nested + 8 * (most // _LANES) * rows + 16 * chunks
    if (
        dtype not in exponents()
        or blocksize != _VECTOR << max(shift, 0)
        or size % blocksize
        or threads > most
        or shared > _SHARED[1]
        or outputs * vectors >= 1 << 31
    ):
        return None
    blocks = min(-(-outputs // (rows * parts)), _BLOCKS * count)
    limit = next(limit for limit in _SHARED if shared <= limit)
    kernel = _kernel(device, dtype, nested, rows, each, most, limit)
    return _Plan(kernel, (blocks, 1), threads, shared, splits, shift)


@cache
def _kernel(
    device: int, dtype: Any, nested: bool, rows: int, vectors: int, threads: int, shared: int
) -> Kernel:
    """The compiled kernel.

    Raises:
        KernelError: This machine cannot compile it.
    """
    import torch

    constants = {
        "BITS": 8 * dtype.itemsize,
        "EXPONENT": exponents()[dtype],
        "NESTED": int(nested),
        "ROWS": rows,
        "VECTORS": vectors,
        "THREADS": threads,
    }
    file = Path(__file__).with_suffix(".cu")
    return compiled(file, "one_row_4bit", constants, torch.device("cuda", device), threads, shared)
