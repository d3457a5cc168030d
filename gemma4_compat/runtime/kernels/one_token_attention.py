"""Computes the attention of one token in a kernel that splits the keys, ``one_token_attention.cu``.

PyTorch's kernels give each head of a single query to one block, or to a few.  The GPU then reads a
long cache with a few of its processors.  This kernel gives each range of keys to a block, and reads
keys and values once for all query heads that share them.  A range that the mask leaves out is not
read, such as the free part of a static cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .compiler import Kernel, KernelError, compiled, launcher
from .replacing import current_device, dtypes, raw_stream
from .step import is_short_of_memory
from .streams import is_capturing

logger = logging.getLogger(__name__)

_THREADS = 256
_HEADS = 8  # that one block computes, at most
_FEW = 4096  # keys, with which blocks of half as many heads use more of the GPU
_SIZES = (32, 64, 128, 256, 512)  # of a head
#: Keys of one block, at least and at most.  So many keys or fewer are computed by one block.
_LEAST, _MOST, _ONE_BLOCK = 16, 1024, 32
_LONGEST = 4096 * _MOST  # keys
_FAR = 2**31  # strides are 32-bit numbers in the kernel
_ALIGNED = 16  # bytes of a load
_PLANS = 4096  # that are kept


class _Plan(NamedTuple):
    """What the layout of the inputs decides."""

    attend: Callable[..., bool]
    blocks: int
    combine: Callable[..., bool] | None
    combining: int  # blocks
    output: tuple[int, ...]
    partial: int  # float32 values of partial results


_plans: dict[Any, _Plan | None] = {}


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
    import torch

    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    layout = (float(scale), *map(_layout, tensors))
    if layout not in _plans:
        try:
            plan = _plan_of(float(scale), *tensors)
        except KernelError as error:
            if is_short_of_memory(error):
                return None
            logger.info("PyTorch computes the attention of one token: %s", error)
            plan = None
        if plan is None and is_capturing(query.device):
            return None
        if len(_plans) >= _PLANS:
            _plans.clear()
        _plans[layout] = plan
    plan = _plans[layout]
    if plan is None:
        return None
    index = query.get_device()
    if current_device()() != index:
        with torch.cuda.device(index):
            return attention(query, key, value, mask, scale)
    try:
        output = torch.empty(plan.output, dtype=query.dtype, device=query.device)
        partial = torch.empty(plan.partial, dtype=torch.float32, device=query.device)
    except torch.cuda.OutOfMemoryError:  # PyTorch raises it, or needs less
        return None
    pointers, stream = (output.data_ptr(), partial.data_ptr()), raw_stream()(index)
    inputs = [tensor.data_ptr() for tensor in tensors]
    inputs += [0] * (4 - len(inputs))  # a mask that does not exist is not read
    done = plan.attend(plan.blocks, stream, *pointers, *inputs)
    if plan.combine is not None:
        done = done and plan.combine(plan.combining, stream, *pointers)
    return output if done else None


def _layout(tensor: Any) -> tuple[Any, ...]:
    shape, stride, device = tensor.shape, tensor.stride(), tensor.device
    return type(tensor), shape, stride, tensor.dtype, device, tensor.data_ptr() % _ALIGNED


def _plan_of(scale: float, query: Any, key: Any, value: Any, mask: Any = None) -> _Plan | None:
    """How to compute these inputs; ``None`` if the kernel cannot, or is not compiled in a capture.

    Raises:
        KernelError: This machine cannot compile or load the kernel.
    """
    import torch

    if not _fits(query, key, value, mask):
        return None
    batch, heads, _, size = query.shape
    key_heads, length = key.shape[1:3]
    most = _HEADS if batch * key_heads * length > _FEW else _HEADS // 2
    per_block = next(n for n in range(most, 0, -1) if heads // key_heads % n == 0)
    groups = heads // per_block
    keys = _keys_of_a_block(length, batch * groups, size, query.device)
    splits = -(-length // keys)
    masked = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    kind = (query.device, query.dtype, size)
    attend = _kernel(*kind, "one_token_attention", per_block, masked)
    combine = _kernel(*kind, "combined", 1, 0) if splits > 1 else None
    if attend is None or (combine is None and splits > 1):
        return None
    strides = [0, 0, 0]
    if mask is not None:
        strides = [mask.stride(i) if mask.shape[i] > 1 else 0 for i in (0, 1, 3)]
    numbers = (
        *(scale, splits, length, keys, groups, heads // key_heads // per_block),
        *(*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *strides),
    )
    return _Plan(
        attend=launcher(attend, 6, numbers, (_THREADS, 1)),
        blocks=batch * groups * splits,
        combine=launcher(combine, 2, (splits, batch * heads), (_THREADS, 1)) if combine else None,
        combining=batch * heads * max(size // 64, 1),
        output=(batch, 1, heads, size),
        partial=batch * heads * splits * (size + 2) if splits > 1 else 0,
    )


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
    return tensor.data_ptr() % _ALIGNED == 0 and all(
        stride * tensor.itemsize % _ALIGNED == 0 and stride < _FAR
        for stride, count in zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
        if count > 1
    )


def _keys_of_a_block(length: int, rows: int, size: int, device: Any) -> int:
    """So many keys that all blocks run at once, if a block may have so many."""
    if length <= _ONE_BLOCK:
        return length
    blocks = _processors(device) * (1 if size > 256 else 2)
    keys = -(-length * rows // blocks)
    return min(max(-(-keys // _LEAST) * _LEAST, _LEAST), _MOST)


@cache
def _processors(device: Any) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_kernels: dict[Any, Kernel] = {}


def _kernel(device: Any, dtype: Any, size: int, name: str, heads: int, mask: int) -> Kernel | None:
    """The compiled kernel; ``None`` if it is to be compiled in a capture.

    Raises:
        KernelError: This machine cannot compile or load it.
    """
    kind = (device, dtype, size, name, heads, mask)
    kernel = _kernels.get(kind)
    if kernel is None and not is_capturing(device):
        constants = {"INPUT": dtypes()[dtype], "SIZE": size, "HEADS": heads, "MASK": mask}
        shared = 0 if name == "combined" else 4 * _MOST * (1 << (heads - 1).bit_length())
        file = Path(__file__).with_suffix(".cu")
        kernel = _kernels[kind] = compiled(file, name, constants, device, _THREADS, shared)
    return kernel
