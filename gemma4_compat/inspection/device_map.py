"""Check a device map against a model before loading: placement, sizes and traps.

``check_device_map`` is also the command ``gemma4-compat map MODEL --map MAP``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..model.device_maps import checked_map
from ..model.hub import short_name
from ..result import Result
from ..text import size, some, table, wrap
from .mapped import Mapped, Placed, UnknownKey, source_of
from .traps import LEVELS, Trap, traps_of


@dataclass(frozen=True)
class DeviceMapCheck(Result):
    """The effects of a device map.  All sizes are in bytes, by "nf4", "int8" and "bf16".

    ``entries`` are in the map's order.  ``devices`` are the sizes on each device after loading.
    ``saves`` is the GPU memory that offloading saves.  ``uncovered`` are the outermost modules that
    no entry places.
    """

    model: str
    architecture: str
    device_map: Mapping[str, int | str]
    unknown: tuple[UnknownKey, ...]
    uncovered: tuple[str, ...]
    entries: tuple[Placed, ...]
    devices: tuple[Placed, ...]
    saves: Mapping[str, int]
    traps: tuple[Trap, ...]

    @property
    def ok(self) -> bool:
        """No entry is unknown, no module is uncovered, and no trap is an error or a warning."""
        open_traps = (trap for trap in self.traps if trap.level in ("error", "warning"))
        unknown = any(not entry.left_out for entry in self.unknown)
        return not unknown and not self.uncovered and not any(open_traps)

    @property
    def verdict(self) -> str:
        levels = {trap.level for trap in self.traps}
        if self.uncovered:
            return 'this map does not work: add "": 0, or another device for the rest'
        if "error" in levels:
            return "this map does not work"
        if not self.ok:
            unknown = [entry.key for entry in self.unknown if not entry.left_out]
            return f"this map works, but not as written: {_what_to_do(unknown)}"
        return "fine"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def check_device_map(
    model: Any,
    device_map: Mapping[str, Any],
    *,
    quantization_config: Any = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> DeviceMapCheck:
    """Check a device map against a model's module names and sizes; no weight is read.

    Args:
        model: a folder with ``config.json``, a Hub id such as "google/gemma-4-E4B-it" (or with a
            revision, "google/gemma-4-E4B-it@main"), or a transformers or PEFT model, loaded or not.
            The map is for the base model's ``from_pretrained``.  Given to PEFT, a ``device_map``
            has no effect (without ``peft_redispatch``, PEFT dispatches the whole model again): the
            map names modules of the base model, and an adapter follows its base layers.
        device_map: module names to devices: GPU numbers, "cuda:1", "cpu", "disk" or a
            ``torch.device``.
        quantization_config: the ``BitsAndBytesConfig`` to load the model with; the check says
            whether it allows the map.
        offload_folder: the argument of ``from_pretrained``.

    Raises:
        InputError: the folder or repository does not exist, or its ``config.json`` is missing or
            damaged.
        InputError: transformers does not know the model, or the device map is invalid.

    Example:
        >>> device_map = {"model.language_model.embed_tokens_per_layer": "cpu", "": 0}
        >>> check = check_device_map("gemma-4-E2B-it", device_map)
        >>> check.ok
        True
        >>> f"{check.saves['nf4'] / 2**30:.2f} GiB saved on the GPU"
        '4.38 GiB saved on the GPU'
    """
    given = checked_map(device_map)
    with source_of(model) as source:
        mapped = Mapped(source, given, quantization_config, offload_folder)
        return DeviceMapCheck(
            model=source.name,
            architecture=type(mapped.model).__name__,
            device_map=given,
            unknown=tuple(mapped.unknown()),
            uncovered=tuple(mapped.uncovered()),
            entries=tuple(mapped.entries()),
            devices=tuple(mapped.devices()),
            saves=mapped.saves(),
            traps=tuple(traps_of(mapped)),
        )


@dataclass(frozen=True)
class ModelSizes:
    """A model's class, and its size in bytes by quantisation and part."""

    architecture: str
    bytes: Mapping[str, Mapping[str, int]]


def model_sizes(model: Any) -> ModelSizes:
    """The size of a whole model, without a device map; raises as `check_device_map` does."""
    with source_of(model) as source:
        mapped = Mapped(source, {"": 0})
    totals: dict[str, dict[str, int]] = {}
    for quant, tensors in mapped.whole.items():
        parts = totals.setdefault(quant, {})
        for tensor in tensors:
            parts[tensor.part] = parts.get(tensor.part, 0) + tensor.bytes
    return ModelSizes(type(mapped.model).__name__, totals)


# -- what is printed ------------------------------------------------------------------------------


def _folded(entries: Iterable[Placed]) -> list[Placed]:
    """The entries, with three or more consecutive layers on one device as one row."""
    groups: list[list[Placed]] = []
    for entry in entries:
        stem, _, number = entry.name.rpartition(".")
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and number.isdigit()
            and (stem, entry.device) == (last.name.rpartition(".")[0], last.device)
        ):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    rows = []
    for group in groups:
        if len(group) < 3:
            rows += group
            continue
        name = f"{group[0].name} ... {group[-1].name.rpartition('.')[2]} ({len(group)})"
        total = {quant: sum(entry.bytes[quant] for entry in group) for quant in group[0].bytes}
        rows.append(Placed(name, group[0].device, total))
    return rows


def _lines(check: DeviceMapCheck) -> Iterator[str]:
    yield f"{short_name(check.model)} ({check.architecture})"
    yield ""
    quants = list(check.saves)
    rows: list[list[str]] = []
    for entry in _folded(check.entries):
        name = entry.name or ('"" (the rest)' if len(check.entries) > 1 else '""')
        rows.append([name, entry.device, *_cells(entry.bytes, quants)])
    if not check.uncovered:  # a total would lack the uncovered modules
        rows.append([""] * (2 + len(quants)))
        rows += [["loaded", d.device, *_cells(d.bytes, quants)] for d in check.devices]
    if any(check.saves.values()) and not check.uncovered:
        rows.append(["saved on the GPU", "", *_cells(check.saves, quants)])
    yield table(rows, ["entry", "on", *quants], right=range(2, 2 + len(quants)))
    messages = list(_messages(check))
    if messages:
        yield ""
        yield from messages
    yield ""
    yield check.verdict


def _what_to_do(unknown: Sequence[str]) -> str:
    return f"correct or remove {some(unknown, 3)}" if unknown else "see the warning above"


def _cells(numbers: Mapping[str, int], quants: Iterable[str]) -> list[str]:
    return [_short(numbers[quant]) for quant in quants]


def _short(number: int) -> str:
    """A size in at most eight characters: the longest module name and three sizes fit in a line."""
    if number < 0:
        return f"-{_short(-number)}"
    text = size(number)
    digits, unit = text.split()
    for places in (1, 0):
        if len(text) > 8:
            text = f"{float(digits):.{places}f} {unit}"
    return text


def _messages(check: DeviceMapCheck) -> Iterator[str]:
    indent = " " * 9
    for unknown in check.unknown:
        text = f"{unknown.key} is not a module of this model: this entry has no effect"
        if unknown.left_out:
            text = f"{unknown.key} is not in this checkpoint: this entry has no effect"
        if unknown.closest:
            text += f"; the closest name is {unknown.closest}, which is on {unknown.closest_on}"
        yield wrap(text, indent, f"{'unknown':<9}")
    for name in check.uncovered[:8]:
        yield wrap(f"{name} has no entry", indent, f"{'missing':<9}")
    if len(check.uncovered) > 8:
        yield wrap(f"and {len(check.uncovered) - 8} more have no entry", indent, f"{'missing':<9}")
    for level in LEVELS:
        for trap in check.traps:
            if trap.level == level:
                yield wrap(trap.text, indent, f"{level:<9}")
