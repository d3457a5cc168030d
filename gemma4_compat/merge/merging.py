"""Merges in memory, and writes the merged model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MergeError, failures_of
from . import parity
from .models import adapted, load_base, untie
from .prompts import all_inputs
from .result import Parity

if TYPE_CHECKING:
    from torch import Tensor

_LIMIT = 0.5  # the largest tolerance: a larger difference means another model
_MARGIN = 2  # the tolerance, as a multiple of the change by one more rounding


@dataclass
class Merged:
    """The merged model, its inputs and logits by prompt, and the comparison."""

    model: Any
    inputs: Mapping[str, dict[str, Tensor]]
    logits: Mapping[str, Tensor]
    rows: tuple[Parity, ...]
    notes: tuple[str, ...]


def merged_in_memory(
    base: Path,
    adapter: Path,
    tokens: Mapping[str, Tensor],
    dtype: str,
    device: str,
    progress: Callable[[str], None],
) -> Merged:
    """Load base and adapter, merge, and compare.

    Raises:
        MergeError: base or adapter cannot be loaded, merging failed, or the logits with the
            adapter are not finite.
    """
    progress(f"loading {base} in {dtype}")
    model = load_base(base, dtype, device)
    inputs, notes = all_inputs(model, tokens)
    progress(f"loading {adapter}")
    with failures_of(f"loading {adapter} on {base} failed", MergeError):
        model = adapted(model, adapter, device)

    expected, rounding = {}, 0.0
    for name in _each(inputs, "outputs with the adapter", progress):
        with failures_of(f"computing outputs for {name!r} failed", MergeError):
            inputs[name] = parity.continued(model, inputs[name])
            logits, effect, change = _with_adapter(model, inputs[name], dtype)
        if not logits.isfinite().all():
            raise MergeError(f"with the adapter loaded, the logits for {name!r} are not finite")
        expected[name] = logits, effect
        rounding = max(rounding, change)
    progress("merging")
    with failures_of("merging failed", MergeError):
        model = model.merge_and_unload()
        untie(model)

    tolerance = min(_MARGIN * rounding, _LIMIT)
    rows, merged = [], {}
    for name in _each(inputs, "outputs merged", progress):
        merged[name] = parity.logits(model, inputs[name])
        rows.append(parity.compare(name, merged[name], *expected.pop(name), tolerance))
    notes += _on_effects([row.effect for row in rows], tolerance)
    return Merged(model, inputs, merged, tuple(rows), tuple(notes))


def _with_adapter(model: Any, prompt: dict[str, Tensor], dtype: str) -> tuple[Tensor, float, float]:
    """The logits; how far the adapter, and one more rounding, change them (relative)."""
    logits = parity.logits(model, prompt)
    with model.disable_adapter():
        effect = parity.worst(parity.logits(model, prompt), logits)
    with parity.rounded_once_more(model, dtype):
        change = parity.worst(parity.logits(model, prompt), logits)
    return logits, effect, change


def _each(names: Mapping[str, Any], step: str, progress: Callable[[str], None]) -> Iterator[str]:
    for number, name in enumerate(list(names), start=1):
        progress(f"{step} {number}/{len(names)}: {name[:40]!r}")
        yield name


def _on_effects(effects: list[float], tolerance: float) -> list[str]:
    if not any(effects):
        return ["the adapter changes nothing: the outputs are those of the base model"]
    if max(effects) <= tolerance:
        return ["the adapter changes these outputs by less than the tolerance for rounding"]
    return []


def write(
    merged: Merged, folder: Path, dtype: str, device: str, progress: Callable[[str], None]
) -> None:
    """Write the merged model, free it, load the written files, and compare their logits.

    Raises:
        MergeError: writing failed, or the logits of the written model differ.
    """
    import torch

    size = sum(p.numel() * p.element_size() for p in merged.model.parameters())
    shard = max(size // 8, 2**26)  # writing a shard copies it in memory
    with failures_of(f"writing to {folder.parent} failed", MergeError):
        merged.model.save_pretrained(folder, max_shard_size=shard)
    merged.model = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    progress("reading it back")
    written = load_base(folder, dtype, device)
    for name, prompt in merged.inputs.items():
        if not torch.equal(parity.logits(written, prompt), merged.logits[name]):
            raise MergeError("the written checkpoint does not give the merged model's logits")
