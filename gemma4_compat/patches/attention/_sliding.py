"""The patch ``sliding_prompt_attention`` for each family of models."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from ...engine import Kind, Patch
from ...runtime.kernels.streams import is_capturing
from .._families import Family
from ._sdpa import replace

#: Queries of a part, and the fewest of a prompt that is computed in parts.
_PART, _LEAST = 1024, 4096
_ALIGNED = 64  # keys at which a range begins and ends, for PyTorch's fast kernels
_WORTH = 0.6  # of the scores, at most

_thread = threading.local()  # .last: a reference to a mask, its version, and its ranges


def patch_of(family: Family, name: str, symptom: str) -> Patch:
    """The patch for a family's attention class."""
    patch = Patch(
        name=name,
        kind=Kind.FAST,
        symptom=symptom,
        affects=(family.requirement,),
        changes=(
            f"On a GPU, sliding layers of {family.name} compute a prompt of 4,096 tokens or more "
            "in parts, each with the keys of its windows, if attn_implementation is sdpa.  The "
            "result differs by rounding."
        ),
        unreported="PyTorch's scaled_dot_product_attention has no argument for a window.",
    )
    replace(patch, family, _is_long_and_sliding, _attention)
    return patch


def _is_long_and_sliding(layer: Any, hidden_states: Any) -> bool:
    return (
        hidden_states.shape[1] >= _LEAST
        and getattr(layer, "sliding_window", None) is not None
        and not is_capturing(hidden_states.device)  # the CPU reads the ranges
    )


def _attention(
    sdpa: Any, layer: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> Any:
    import torch

    parts = None
    if options.get("position_bias") is None and options.get("cache") is None:
        parts = _parts(mask, query.shape[2], key.shape[2])
    if parts is None:
        return sdpa(layer, query, key, value, mask, **options)
    outputs = [
        sdpa(
            layer,
            query[:, :, queries],
            key[:, :, keys],
            value[:, :, keys],
            mask[..., queries, keys],
            **options,
        )[0]
        for queries, keys in parts
    ]
    return torch.cat(outputs, dim=1), None


def _parts(mask: Any, queries: int, keys: int) -> list[tuple[slice, slice]] | None:
    """The parts of queries, and their ranges of keys; ``None`` if they are not worth it."""
    import torch

    if (
        type(mask) is not torch.Tensor
        or mask.dtype != torch.bool
        or mask.ndim != 4
        or tuple(mask.shape[2:]) != (queries, keys)
    ):
        return None
    version = None if mask.is_inference() else mask._version
    last = getattr(_thread, "last", None)
    if last is not None and last[0]() is mask and last[1] == version is not None:
        return last[2]  # type: ignore[no-any-return]
    parts: list[tuple[slice, slice]] | None = _parts_of(mask)
    scores = sum((q.stop - q.start) * (k.stop - k.start) for q, k in parts or ())
    if scores > _WORTH * queries * keys:
        parts = None
    _thread.last = weakref.ref(mask), version, parts
    return parts


def _parts_of(mask: Any) -> list[tuple[slice, slice]]:
    import torch

    queries, keys = mask.shape[2:]
    starts = range(0, queries, _PART)
    seen = [mask[:, :, start : start + _PART].flatten(0, 2).any(0) for start in starts]
    numbers = torch.arange(keys, device=mask.device)
    ranges = torch.stack(
        [
            torch.stack(
                [torch.where(each, numbers, keys).amin(), torch.where(each, numbers, -1).amax()]
            )
            for each in seen
        ]
    ).tolist()
    parts = []
    for start, (first, last) in zip(starts, ranges, strict=True):
        begin = min(first, keys - 1) // _ALIGNED * _ALIGNED  # a part of padding gets some keys, too
        end = min(-(-(max(last, begin) + 1) // _ALIGNED) * _ALIGNED, keys)
        parts.append((slice(start, min(start + _PART, queries)), slice(begin, end)))
    return parts
