"""In a long prompt, a sliding layer computes the scores of all keys, and uses those of its window.

PyTorch's attention does not know that a mask is that of a window.  With 8,192 tokens and a window
of 512, fifteen of sixteen scores are computed for nothing.  In E2B this is a quarter of the time of
the prompt, and more in longer prompts.

The fix gives PyTorch a part of the queries at a time, with those keys that the mask leaves to them.
It reads the ranges of keys from the mask, so that any mask is right, such as those of images and of
chunks.  PyTorch's kernels then add the keys in other blocks, or other kernels run, so the logits
differ by rounding.  Gradients, torch.compile, short prompts, prompts with padding and other
implementations than ``sdpa`` stay as they are.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from ...engine import Kind, Patch
from ...runtime.kernels.streams import is_capturing
from .._families import FAMILIES, former
from ._sdpa import are_known, replace

PATCH = Patch(
    name="sliding_prompt_attention",
    kind=Kind.FAST,
    symptom="Gemma 4 needs long for a prompt of 8,000 tokens, although most layers see only 512",
    affects=(),
    unreported="PyTorch's scaled_dot_product_attention has no argument for a window.",
    former=former("sliding_prompt_attention"),
)

#: Queries of a part, and the fewest of a prompt that is computed in parts.
_PART, _LEAST = 1024, 4096
_ALIGNED = 64  # keys at which a range begins and ends, for PyTorch's fast kernels
_WORTH = 0.6  # of the scores, at most

_thread = threading.local()  # .last: a reference to a mask, its version, and its ranges


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

    parts = _parts(mask, query.shape[2], key.shape[2]) if are_known(options) else None
    if parts is None:
        return sdpa(layer, query, key, value, mask, **options)
    outputs = []
    for queries, keys in parts:
        states = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        outputs.append(sdpa(layer, *states, mask[..., queries, keys], **options)[0])
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
    if scores > _WORTH * queries * keys or not mask.any(-1).all():  # padding has other values
        parts = None
    _thread.last = weakref.ref(mask), version, parts
    return parts


def _parts_of(mask: Any) -> list[tuple[slice, slice]]:
    import torch

    queries, keys = mask.shape[2:]
    starts = range(0, queries, _PART)
    pieces = (mask[:, :, start : start + _PART] for start in starts)
    seen = torch.stack([each.flatten(0, 2).any(0) for each in pieces])
    numbers = torch.arange(keys, device=mask.device)
    ends = torch.where(seen, numbers, keys).amin(1), torch.where(seen, numbers, -1).amax(1)
    ranges = torch.stack(ends, dim=1).tolist()
    parts = []
    for start, (first, last) in zip(starts, ranges, strict=True):
        begin = min(first, keys - 1) // _ALIGNED * _ALIGNED  # a part of padding gets some keys, too
        end = min(-(-(max(last, begin) + 1) // _ALIGNED) * _ALIGNED, keys)
        parts.append((slice(start, min(start + _PART, queries)), slice(begin, end)))
    return parts


for family in FAMILIES:
    replace(PATCH.part(family.name, family.requirement), family, _is_long_and_sliding, _attention)
