"""Attention of full layers copies all cached keys and values for each query head.

31B has 32 query heads and 4 KV heads.  PyTorch has one fused kernel for heads of more than 256, and
that takes no grouped queries.  So ``repeat_kv`` copies the whole static cache for each query head:
at 32,768 tokens 1 GiB of keys and as many values, eight times those of the cache, in each full
layer.  26B-A4B copies half as much, and E4B a quarter.

The fix gives the kernel the first query head of each KV head as the first sequence of a batch, the
second ones as the second sequence, and so on.  These sequences share their keys and values, so one
view serves all.  The kernel computes each head of each sequence by itself: the result has the same
bits, and the first forward shows whether this GPU computes so.  Batches, gradients, torch.compile
and other implementations than ``sdpa`` stay as they are.
"""

from __future__ import annotations

import sys
from typing import Any

from ...engine import Kind, Patch
from ...objects import View
from ...runtime.capture.cudnn import allowed_kernels
from ...runtime.kernels.launch import Launcher
from ...runtime.kernels.trials import pattern, require_equal
from .._families import GEMMA4, UNIFIED
from ._sdpa import are_known, replace

PATCH = Patch(
    name="grouped_query_attention",
    kind=Kind.MEMORY,
    symptom=(
        "torch.OutOfMemoryError in repeat_kv: after 32,768 tokens, attention of 31B needs 2 GiB "
        "beside its KV cache, and that of E4B 0.5 GiB"
    ),
    affects=(),
    unreported="PyTorch's memory-efficient attention takes no grouped queries.",
)

_SDPA = "transformers.integrations.sdpa_attention"
#: For heads of this size or less, PyTorch chooses between kernels by the shapes.
_SEVERAL_KERNELS = 256
#: The queries and keys of a comparison: more than one block of the kernel, and a part of another.
_QUERIES, _KEYS = 34, 65
#: With so many keys or more, there is a comparison with one more than this number.
_MANY_KEYS = 4096

_COMPARED = Launcher("for grouped queries", "transformers copies the keys for each query head")


def _has_groups(layer: Any, hidden_states: Any) -> bool:
    return bool(
        hidden_states.shape[0] == 1
        and layer.head_dim > _SEVERAL_KERNELS
        and 1 < getattr(layer, "num_key_value_groups", 1) < layer.config.num_attention_heads
    )


def _attention(
    sdpa: Any, layer: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> Any:
    if (
        _can_group(query, key, value, mask)
        and are_known(options)
        and _has_same_bits(sdpa, layer, query, key, mask, options.get("scaling"))
    ):
        return _grouped(sdpa, layer, query, key, value, mask, **options), None
    return sdpa(layer, query, key, value, mask, **options)


def _can_group(query: Any, key: Any, value: Any, mask: Any) -> bool:
    import torch

    packed = query.shape[2] == 1 and hasattr(sys.modules[_SDPA], "pack_gqa")  # it copies nothing
    return bool(
        not packed
        and (mask is None or _is_for_all_heads(mask, query.dtype))
        and 1 < key.shape[1] < query.shape[1]
        and key.shape == value.shape
        and torch.backends.cuda.mem_efficient_sdp_enabled()
    )


def _is_for_all_heads(mask: Any, dtype: Any) -> bool:
    import torch

    usual = type(mask) is torch.Tensor and mask.dtype in (torch.bool, dtype)
    return usual and mask.ndim == 4 and mask.shape[:2] == (1, 1)


def _grouped(
    sdpa: Any, layer: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> Any:
    """[1, queries, heads, size], as ``sdpa_attention_forward`` returns it."""
    heads, queries, size = query.shape[1:]
    groups = heads // key.shape[1]
    keys, values = (each.expand(groups, -1, -1, -1) for each in (key, value))
    query = query.view(-1, groups, queries, size).transpose(0, 1)
    ungrouped = View(layer, num_key_value_groups=1)
    output, _ = sdpa(ungrouped, query, keys, values, mask, **options)
    return output.permute(1, 2, 0, 3).reshape(1, queries, heads, size)


def _has_same_bits(sdpa: Any, layer: Any, query: Any, key: Any, mask: Any, scaling: Any) -> bool:
    """Whether this GPU computes the same; compared once for inputs of a kind."""
    import torch

    dtype = None if mask is None else mask.dtype
    heads, queries, size = query.shape[1:]
    key_heads, queries, device = key.shape[1], min(queries, _QUERIES), query.device
    keys = _MANY_KEYS + 1 if key.shape[2] >= _MANY_KEYS else _KEYS

    def compared() -> bool:
        q = pattern((1, heads, queries, size), query.dtype, device)
        k, v = (pattern((1, key_heads, keys, size), q.dtype, device, n) for n in (1, 2))
        seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
        seen = seen.tril(keys - queries)
        if dtype is None:  # then the kernel itself leaves out keys after a query
            seen = None
        elif dtype != torch.bool:
            seen = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -1e4)
        inputs = torch.backends.cuda.SDPAParams(q, q, q, seen, 0.0, seen is None, False)
        if not torch.backends.cuda.can_use_efficient_attention(inputs):
            return False
        options = {"dropout": 0.0, "scaling": scaling}
        found = _grouped(sdpa, layer, q, k, v, seen, **options)
        require_equal(found, sdpa(layer, q, k, v, seen, **options)[0])
        return True

    if query.is_meta:
        return True
    shape = heads, key_heads, size, queries, keys
    kind = device, query.dtype, dtype, shape, scaling, allowed_kernels()
    return bool(_COMPARED.get(kind, device, _COMPARED.checked, kind, device, compared))


for family in (GEMMA4, UNIFIED):
    part = PATCH.part(family.name, family.requirement)
    replace(part, family, _has_groups, _attention, on_meta=True)
