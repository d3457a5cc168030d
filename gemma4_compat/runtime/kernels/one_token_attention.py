"""Computes the attention of one token in a kernel that splits the keys, ``one_token_attention.cu``.

PyTorch's kernels give each head of a single query to one block, or to a few.  The GPU then reads a
long cache with a few of its processors.  This kernel gives each range of keys to a block, and reads
keys and values once for all query heads that share them.  A range that the mask leaves out is not
read, such as the free part of a static cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from . import compiler
from .launch import Launcher
from .replacing import ALIGNMENT, as_current, dtypes, raw_stream
from .trials import pattern, require_near

#: A kind is a layout: with a growing cache, each token has another one.
LAUNCHER = Launcher("one_token_attention", "PyTorch computes the attention of one token", most=4096)

_FILE = Path(__file__).with_suffix(".cu")
_THREADS = 256
_HEADS = 8  # that one block computes, at most
_FEW = 4096  # keys, with which blocks of half as many heads use more of the GPU
_SIZES = (32, 64, 128, 256, 512)  # of a head
#: Keys of one block, at least and at most.  So many keys or fewer are computed by one block.
_LEAST, _MOST, _ONE_BLOCK = 16, 768, 32
_LONGEST = 4096 * _MOST  # keys
_FAR = 2**31  # strides are 32-bit numbers in the kernel


class _Launch(NamedTuple):
    """The launch parameters for inputs of one layout: shapes, strides, dtypes, alignment."""

    key: Any  # of the kernels
    attend: Callable[..., None]
    blocks: int
    combine: Callable[..., None] | None
    combining: int  # blocks
    output: tuple[int, ...]
    partial: int  # float32 values of partial results


def attention(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any | None:
    """The attention of one query per head; ``None`` if the kernel cannot compute it.

    Args:
        query: [batch, heads, 1, size] on a GPU, in bfloat16 or float16.
        key: [batch, key heads, length, size].
        value: Like ``key``.
        mask: ``None``, or [batch or 1, heads or 1, 1, length]: bool, or in the dtype of the query,
            which is added to the scores.
        scale: The factor of the scores.

    Returns:
        [batch, 1, heads, size], contiguous.  Scores, weights and sums are float32.  A query that
        the mask leaves without keys gets zeros.
    """
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    layout = (float(scale), *map(_layout, tensors))
    plan = LAUNCHER.kinds.get(layout) or LAUNCHER.get(
        layout, query.device, _plan_of, scale, *tensors
    )
    if plan is None:
        return None
    index = query.get_device()
    try:
        with as_current(index):
            return _launched(plan, index, *tensors)
    except Exception as error:  # PyTorch raises it, too, or needs less memory
        return LAUNCHER.failed(layout, query.device, error, plan.key)


def _launched(plan: _Launch, index: int, *tensors: Any) -> Any:
    import torch

    output = torch.empty(plan.output, dtype=tensors[0].dtype, device=tensors[0].device)
    partial = torch.empty(plan.partial, dtype=torch.float32, device=tensors[0].device)
    pointers, stream = (output.data_ptr(), partial.data_ptr()), raw_stream()(index)
    inputs = [tensor.data_ptr() for tensor in tensors]
    inputs += [0] * (4 - len(inputs))  # a mask that does not exist is not read
    plan.attend(plan.blocks, stream, *pointers, *inputs)
    if plan.combine is not None:
        plan.combine(plan.combining, stream, *pointers)
    return output


def _layout(tensor: Any) -> tuple[Any, ...]:
    shape, stride, device = tensor.shape, tensor.stride(), tensor.device
    return type(tensor), shape, stride, tensor.dtype, device, tensor.data_ptr() % ALIGNMENT


def _plan_of(scale: float, query: Any, key: Any, value: Any, mask: Any = None) -> _Launch | None:
    """How to compute these inputs; ``None`` if the kernel cannot."""
    import torch

    if not _fits(query, key, value, mask):
        return None
    batch, heads, _, size = query.shape
    key_heads, length = key.shape[1:3]
    most = _HEADS if batch * key_heads * length > _FEW else _HEADS // 2
    per_block = next(n for n in range(most, 0, -1) if heads // key_heads % n == 0)
    keys = _keys_of_a_block(length, batch * heads // per_block, size, query.device)
    masked = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    kind = query.device, query.dtype, size, per_block, masked, keys < length
    LAUNCHER.checked(kind, query.device, _compare, *kind)
    return _plan(kind, keys, scale, query, key, value, mask)


def _plan(
    kind: tuple[Any, ...], keys: int, scale: float, query: Any, key: Any, value: Any, mask: Any
) -> _Launch:
    """With so many keys of a block."""
    device, dtype, size, per_block, masked, _ = kind
    (batch, heads, _, _), (_, key_heads, length, _) = query.shape, key.shape
    groups, splits = heads // per_block, -(-length // keys)
    strides = [0, 0, 0]
    if mask is not None:
        strides = [mask.stride(i) if mask.shape[i] > 1 else 0 for i in (0, 1, 3)]
    numbers = (
        *(float(scale), splits, length, keys, groups, heads // key_heads // per_block),
        *(*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *strides),
    )
    stages = 2 if _properties(device).major >= 8 else 1  # else a copy waits
    constants = {"INPUT": dtypes()[dtype], "SIZE": size, "HEADS": per_block, "MASK": masked}
    constants["STAGES"] = stages
    copies, weights = 64 * stages * max(size, 256), 4 << (per_block - 1).bit_length()
    shared = copies + weights * _MOST
    attend = compiler.compiled(_FILE, "one_token_attention", device, shared, **constants)
    combine, block = None, (_THREADS, 1)
    if splits > 1:
        constants |= {"HEADS": 1, "MASK": 0}
        combined = compiler.compiled(_FILE, "combined", device, **constants)
        combine = compiler.launcher(combined, 2, (splits, batch * heads), block, early=True)
    return _Launch(
        key=kind,
        attend=compiler.launcher(
            attend, 6, numbers, block, shared=copies + weights * keys, early=True
        ),
        blocks=batch * groups * splits,
        combine=combine,
        combining=batch * heads * max(size // 64, 1),
        output=(batch, 1, heads, size),
        partial=batch * heads * splits * (size + 2) if splits > 1 else 0,
    )


def _compare(*kind: Any) -> None:
    """Compare the kernels with PyTorch's for two rows, two heads of keys, and few keys."""
    from torch.nn.functional import scaled_dot_product_attention

    device, dtype, size, per_block, masked, in_splits = kind
    length, heads, scale = 77, 2 * per_block, 4 * size**-0.5
    shapes = enumerate(((2, heads, 1, size), (2, 2, length, size), (2, 2, length, size)))
    inputs = [pattern(shape, dtype, device, seed) for seed, shape in shapes]
    mask: Any = pattern((2, heads, 1, length), dtype, device, 7) if masked else None
    if masked == 1:
        mask = mask > -0.5
    query, key, value = inputs
    plan = _plan(kind, 48 if in_splits else 80, scale, query, key, value, mask)
    own = _launched(plan, device.index, *inputs, *([] if mask is None else [mask]))
    key, value = (each.repeat_interleave(per_block, 1) for each in (key, value))
    theirs = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    query, key, value = (each.double().view(2, 2, -1, size) for each in inputs)
    scores = query @ key.transpose(2, 3) * scale
    if masked:
        scores += (mask.double().log() if masked == 1 else mask.double()).view_as(scores)
    exact = (scores.softmax(-1) @ value).view_as(theirs)
    require_near(own.transpose(1, 2), theirs, exact)


def _fits(query: Any, key: Any, value: Any, mask: Any) -> bool:
    import torch

    for each in (query, key, value):
        if (
            type(each) is not torch.Tensor
            or not each.is_cuda
            or each.ndim != 4
            or each.device != query.device
            or each.dtype != query.dtype
            or each.stride(3) != 1
            or not _is_aligned(each)
        ):
            return False
    batch, heads, queries, size = query.shape
    if (
        query.dtype not in (torch.bfloat16, torch.float16)
        or queries != 1
        or size not in _SIZES
        or key.shape != value.shape
        or key.shape[0] != batch
        or key.shape[3] != size
        or not 0 < key.shape[2] <= _LONGEST
        or not key.shape[0] * key.shape[1]
        or heads % key.shape[1]
    ):
        return False
    return mask is None or (
        type(mask) is torch.Tensor
        and mask.ndim == 4
        and mask.device == query.device
        and mask.dtype in (torch.bool, query.dtype)
        and mask.shape[0] in (1, batch)
        and mask.shape[1] in (1, heads)
        and tuple(mask.shape[2:]) == (1, key.shape[2])
        and max(mask.stride()) < _FAR
    )


def _is_aligned(tensor: Any) -> bool:
    """Whether the kernel can read 16 bytes at a time, and count with 32-bit strides."""
    return tensor.data_ptr() % ALIGNMENT == 0 and all(
        stride * tensor.itemsize % ALIGNMENT == 0 and stride < _FAR
        for stride, count in zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
        if count > 1
    )


def _keys_of_a_block(length: int, rows: int, size: int, device: Any) -> int:
    """So many keys that all blocks run at once, if a block may have so many."""
    if length <= _ONE_BLOCK:
        return length
    blocks: int = _properties(device).multi_processor_count * (1 if size > 256 else 2)
    keys = -(-length * rows // blocks)
    return min(max(-(-keys // _LEAST) * _LEAST, _LEAST), _MOST)


@cache
def _properties(device: Any) -> Any:
    import torch

    return torch.cuda.get_device_properties(device)
