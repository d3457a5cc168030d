"""The product of a few rows of inputs and a weight in 4 bits, in forwards of as many tokens.

For one row, bitsandbytes' kernel takes several times as long as the memory needs.  This kernel
(``one_row_4bit.cu``) has more loads on their way at a time.  It reads the same packed values and
maxima, multiplies them in float32, and rounds once.  bitsandbytes rounds the code, the maximum and
their product to the dtype of the inputs before that, so this kernel is the more exact one.

The order of its additions depends on the shape of the weight only: the outputs of an eager and of a
captured step are equal bit for bit, and those of a row with and without other rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ...model.parts import is_ours
from . import compiler
from .launch import Launcher
from .replacing import ALIGNMENT, FEW_TOKENS, as_current, dtypes, raw_stream
from .trials import maxima_of, pattern, require_near, values_of

LAUNCHER = Launcher("one_row_4bit", "bitsandbytes multiplies rows with weights in 4 bits")

_thread = threading.local()  # .few_tokens: whether this thread runs such a forward
_FILE = Path(__file__).with_suffix(".cu")

_LANES = 16  # threads that share rows
_VECTOR = 32  # values
_NESTED_BLOCK = 256
#: How many threads of a multiprocessor one row for each thread takes, at most, for so many rows.
_ROWS = ((1, 1750), (2, 5000), (4, None))
_THREADS = 384  # of a block, about
_BLOCKS = 4  # of a multiprocessor, at most
_SHARED = 48 << 10  # bytes of a block, which each GPU has
_SUMS = 16  # of a thread


@contextmanager
def few_tokens() -> Iterator[None]:
    """In this context, this thread runs a forward of a text model with a few tokens."""
    outside = in_few_tokens()
    try:
        _thread.few_tokens = True
        yield
    finally:
        _thread.few_tokens = outside


def in_few_tokens() -> bool:
    """Whether this thread runs a forward of a text model with a few tokens."""
    return getattr(_thread, "few_tokens", False)


def in_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A text model's forward; with a few tokens, this thread multiplies in the kernel."""
    import torch

    if (
        torch.compiler.is_compiling()
        or not _has_few_tokens(*args, **kwargs)
        or not is_ours(self)
        or torch.jit.is_tracing()
    ):
        return original(self, *args, **kwargs)
    with few_tokens():
        return original(self, *args, **kwargs)


def _has_few_tokens(
    input_ids: Any = None, *_: Any, inputs_embeds: Any = None, **others: Any
) -> bool:
    import torch

    inputs = inputs_embeds if input_ids is None else input_ids
    if not isinstance(inputs, torch.Tensor) or inputs.ndim < 1:
        return False
    size = inputs.shape[-1] if input_ids is None else 1
    return bool(0 < inputs.numel() <= FEW_TOKENS * size)


def matmul(original: Any, A: Any, B: Any, quant_state: Any, *args: Any, **kwargs: Any) -> Any:
    """``bitsandbytes.matmul_4bit``; with a few tokens, the kernel multiplies if it can."""
    import torch

    if not (torch.compiler.is_compiling() or args or kwargs.get("bias") is not None):
        if in_few_tokens() and kwargs.get("out") is None:
            output = product(original, A, B, quant_state)
            if output is not None:
                return output
    return original(A, B, quant_state, *args, **kwargs)


def product(original: Any, inputs: Any, weight: Any, state: Any) -> Any:
    """The product, or ``None`` if the kernel cannot compute it.

    Args:
        original: ``bitsandbytes.matmul_4bit``.
        inputs: [..., inputs of the layer], at most 8 rows in all; bfloat16, float16, float32.
        weight: The packed values of [outputs, inputs], of any dtype and shape.
        state: The ``QuantState`` of the weight.
    """
    import torch

    if type(inputs) is not torch.Tensor or not inputs.is_cuda or inputs.requires_grad:
        return None
    kind = None
    try:
        (outputs, size), index, nested = state.shape, inputs.get_device(), state.nested
        tokens = inputs.numel() // size
        if size != inputs.shape[-1] or not 0 < tokens <= FEW_TOKENS or not inputs.is_contiguous():
            return None
        kind = index, inputs.dtype, outputs, size, bool(nested), state.blocksize, tokens
        code, maxima = state.code, state.absmax
        floats: tuple[Any, ...] = (code, maxima)
        second: tuple[Any, ...] = ()
        if nested:
            if state.state2.blocksize != _NESTED_BLOCK or maxima.dtype is not torch.uint8:
                return None
            second = state.state2.code, state.state2.absmax, state.offset
            floats = code, *second
        for each in floats:
            if each.get_device() != index or each.dtype is not torch.float32:
                return None
        at = inputs.data_ptr()
        packed = weight.data_ptr()
        if (
            (at | packed) % ALIGNMENT
            or 2 * weight.numel() * weight.itemsize != outputs * size
            or maxima.numel() * state.blocksize != outputs * size
            or weight.get_device() != index
            or maxima.get_device() != index
            or code.numel() != 16
            or not weight.is_contiguous()
        ):
            return None
        plan = LAUNCHER.kinds.get(kind)
        plan = plan or LAUNCHER.get(kind, inputs.device, _plan, original, state, *kind)
        if plan is None:
            return None
        out = inputs.new_empty((*inputs.shape[:-1], outputs))
        pointers = (
            packed, maxima.data_ptr(), code.data_ptr(),
            *([each.data_ptr() for each in second] or (0, 0, 0)),
        )  # fmt: skip
        launch, blocks, group, *sizes = plan
        own, by = out.data_ptr(), out.itemsize
        with as_current(index):
            for first in range(0, tokens, group):
                few = min(group, tokens - first)
                places = own + first * by * outputs, at + first * by * size
                launch(blocks, raw_stream()(index), *places, *pointers, *sizes, few)
        return out
    except Exception as error:  # bitsandbytes computes it, or raises its own error
        return LAUNCHER.failed(kind, inputs.device, error)


def _plan(
    original: Any, state: Any, index: int, dtype: Any, outputs: int, size: int, nested: bool,
    blocksize: int, tokens: int,
) -> tuple[Any, ...] | None:  # fmt: skip
    """The launcher for weights of this shape, its blocks and tokens, and two more arguments."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    vectors, shift = size // _VECTOR, (blocksize // _VECTOR).bit_length() - 1
    each = 1 if vectors <= 512 else 3  # vectors of a thread in a row
    splits = -(-vectors // (_LANES * each))
    parts = max(1, _THREADS // (splits * _LANES))
    splits += parts * splits % 2  # whole warps
    threads = parts * splits * _LANES
    most = 512 if threads <= 512 else 1024
    count = properties.multi_processor_count
    share = outputs * splits * _LANES / count
    own = next(rows for rows, top in _ROWS if top is None or share <= top) if each == 1 else 2
    limit = _most_shared(properties)
    group = 1 << (tokens - 1).bit_length()  # tokens of a launch
    while True:
        rows = min(own, _SUMS // group)
        chunks = group * dtype.itemsize * _VECTOR // 16 * ((vectors + 5) // 8 * 8 + 2)
        shared = 4096 + 1024 * nested + 8 * (most // _LANES) * rows * group + 16 * chunks
        if group == 1 or shared <= (limit if group < FEW_TOKENS else limit // 2):
            break
        group //= 2  # two launches take less time than blocks that are alone on a multiprocessor
    if (
        dtype not in dtypes()
        or blocksize != _VECTOR << max(shift, 0)
        or size % blocksize
        or threads > most
        or shared > limit
        or outputs * vectors >= 1 << 31
    ):
        return None
    constants = {"INPUT": dtypes()[dtype], "NESTED": int(nested), "ROWS": rows, "TOKENS": group}
    constants |= {"VECTORS": each, "THREADS": most}
    device, limit = torch.device("cuda", index), limit if shared > _SHARED else _SHARED

    def last(outputs: int) -> tuple[int, int]:  # 32 bits each
        return outputs | vectors << 32, splits | shift << 32

    def compared() -> Any:
        kernel = compiler.compiled(_FILE, "one_row_4bit", device, limit, **constants)
        launch = compiler.launcher(kernel, 11, (), (threads, 1), shared=shared, early=True)
        few = 3 * rows * parts + 1  # for two blocks, which compute other rows after the first
        _compare(original, state, dtype, (group, few, size), partial(launch, 2), last(few))
        return launch

    key = index, dtype, size, nested, blocksize, rows, group
    launch = LAUNCHER.checked(key, device, compared)
    blocks = min(-(-outputs // (rows * parts)), _BLOCKS * count)
    return launch, blocks, group, *last(outputs)


def _most_shared(properties: Any) -> int:
    """The most shared memory that a block of this GPU can have, in bytes."""
    return int(getattr(properties, "shared_memory_per_block_optin", 2 * _SHARED))


def _compare(original: Any, state: Any, dtype: Any, shape: Any, launch: Any, last: Any) -> None:
    """Compare the kernel with bitsandbytes' on a small weight, with codes like those of a state."""
    import torch
    from bitsandbytes.functional import QuantState

    (tokens, outputs, size), code, device = shape, state.code, state.code.device
    rows = pattern((tokens, size), dtype, device)
    packed = pattern((outputs, size // 2), torch.float32, device, 1).mul_(128).to(torch.int8)
    packed = packed.view(torch.uint8)
    code2 = state.state2.code if state.nested else None
    blocks = size // state.blocksize  # of an output
    # bitsandbytes' kernel reads the maxima of four outputs at a time, also beyond the last output
    tensors, maxima = maxima_of((outputs + 3) * blocks, device, code2)
    maxima = maxima[: outputs * blocks]
    options = {"blocksize": state.blocksize, "quant_type": state.quant_type, "dtype": dtype}
    plain = QuantState(absmax=maxima, shape=torch.Size(shape[1:]), code=code, **options)
    theirs = torch.cat([original(row[None], packed.view(-1, 1).t(), plain) for row in rows])
    own = torch.full_like(theirs, float("nan"))
    pointers = [each.data_ptr() for each in (own, rows, packed, tensors[0], code, *tensors[1:])]
    pointers += (8 - len(pointers)) * [0]
    launch(raw_stream()(rows.get_device()), *pointers, *last, tokens)
    weights = values_of(packed, code, maxima.view(outputs, -1))
    for row, found, by_bitsandbytes in zip(rows, own, theirs, strict=True):
        require_near(found, by_bitsandbytes, (weights * row.double()).sum(-1))
