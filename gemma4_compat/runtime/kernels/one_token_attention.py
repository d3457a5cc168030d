"""Computes the attention of one token in a kernel that splits the keys (``one_token_attention.cu``).

PyTorch's kernels give each head of a single query to one block, or to a few.  The GPU then reads a
long cache with a few of its processors.  This kernel gives each range of keys to a block, and reads
keys and values once for all query heads that share them.  A range that the mask leaves out is not
read, such as the free part of a static cache.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

from .compiler import Kernel, KernelError, compiled, exponents
from .step import is_short_of_memory
from .streams import is_capturing

logger = logging.getLogger(__name__)

_THREADS = 256
_HEADS = 8  # that one block computes, at most
_SIZES = (32, 64, 128, 256, 512)  # of a head
#: Keys of one block, at least and at most.  So many keys or fewer are computed by one block.
_LEAST, _MOST, _ONE_BLOCK = 32, 1024, 128
_FAR = 2**31  # strides are 32-bit numbers in the kernel
_ALIGNED = 16  # bytes of a load


def attention(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any | None:
    """The attention of one query per head; ``None`` if the kernel cannot compute it.

    Args:
        query: [batch, heads, 1, size] on a GPU, in bfloat16, float16 or float32.
        key: [batch, key heads, length, size].
        value: Like ``key``.
        mask: ``None``, or [batch or 1, heads or 1, 1, length]: bool, or a dtype of queries that is
            added to the scores.
        scale: The factor of the scores.

    Returns:
        [batch, 1, heads, size], contiguous.  Scores, weights and sums are float32.  A query that
        the mask leaves without keys gets zeros.
    """
    import torch

    if not _fits(query, key, value, mask):
        return None
    batch, heads, _, size = query.shape
    key_heads, length = key.shape[1:3]
    per_block = next(n for n in range(_HEADS, 0, -1) if heads // key_heads % n == 0)
    groups = heads // per_block
    device, dtype = query.device, query.dtype
    keys = _keys_of_a_block(length, batch * groups, size, device)
    splits, masked = -(-length // keys), mask is not None
    first = (device, dtype, size, per_block, mask.dtype if masked else None)
    second = (device, dtype, size, 1, None)
    try:
        attend = _kernel("one_token_attention", *first)
        combine = _kernel("combined", *second) if splits > 1 else attend
    except KernelError:  # Memory is short; the next call tries again.
        return None
    if attend is None or combine is None:
        return None
    out = torch.empty((batch, 1, heads, size), dtype=dtype, device=device)
    partial = batch * heads * splits if splits > 1 else 0
    sums = torch.empty(partial * size, dtype=torch.float32, device=device)
    scales = torch.empty(partial * 2, dtype=torch.float32, device=device)
    masks = [mask.stride(i) if mask.shape[i] > 1 else 0 for i in (0, 1, 3)] if masked else [0] * 3
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        attend(
            (splits, batch * groups), out, sums, scales, query, key, value,
            mask if masked else query,  # not read without a mask
            float(scale), length, keys, groups, heads // key_heads // per_block,
            query.stride(0), query.stride(1), *key.stride()[:3], *value.stride()[:3], *masks,
            stream=stream,
        )  # fmt: skip
        if splits > 1:
            columns = max(size // 64, 1)
            combine((columns, batch * heads), out, sums, scales, splits, stream=stream)
    return out


def _fits(query: Any, key: Any, value: Any, mask: Any) -> bool:
    import torch

    tensors = (query, key, value)
    if not all(
        type(each) is torch.Tensor
        and each.ndim == 4
        and each.device == query.device
        and each.dtype == query.dtype
        and each.stride(3) == 1
        and _is_aligned(each)
        for each in tensors
    ):
        return False
    batch, heads, queries, size = query.shape
    if (
        not query.is_cuda
        or query.dtype not in exponents()
        or queries != 1
        or size not in _SIZES
        or key.shape != value.shape
        or key.shape[0] != batch
        or key.shape[3] != size
        or not batch * key.shape[1] * key.shape[2]
        or heads % key.shape[1]
    ):
        return False
    return mask is None or (
        type(mask) is torch.Tensor
        and mask.ndim == 4
        and mask.device == query.device
        and (mask.dtype == torch.bool or mask.dtype in exponents())
        and mask.shape[0] in (1, batch)
        and mask.shape[1] in (1, heads)
        and tuple(mask.shape[2:]) == (1, key.shape[2])
        and max(mask.stride()) < _FAR
    )


def _is_aligned(tensor: Any) -> bool:
    """Whether the kernel can read 16 bytes at a time, and count with 32-bit strides."""
    size = tensor.itemsize
    return tensor.data_ptr() % _ALIGNED == 0 and all(
        stride * size % _ALIGNED == 0 and stride < _FAR
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


_kernels: dict[Any, Kernel | None] = {}


def _kernel(name: str, device: Any, dtype: Any, size: int, heads: int, mask: Any) -> Kernel | None:
    """The compiled kernel; ``None`` if this machine cannot compile it, or not in a capture.

    Raises:
        KernelError: Memory is short.
    """
    kind = (name, device, dtype, size, heads, mask)
    if kind in _kernels:
        return _kernels[kind]
    if is_capturing(device):
        return None
    bits = 0 if mask is None else 1 if mask not in exponents() else 8 * mask.itemsize
    constants = {
        "BITS": 8 * dtype.itemsize,
        "EXPONENT": exponents()[dtype],
        "SIZE": size,
        "HEADS": heads,
        "MASK": bits,
        "MASK_EXPONENT": exponents().get(mask, 0),
    }
    shared = 0 if name == "combined" else 4 * _MOST * (1 << (heads - 1).bit_length())
    try:
        kernel = compiled(
            Path(__file__).with_suffix(".cu"), name, constants, device, _THREADS, shared
        )
    except KernelError as error:
        if is_short_of_memory(error):
            raise
        logger.info("PyTorch computes the attention of one token: %s", error)
        kernel = None
    _kernels[kind] = kernel
    return kernel
