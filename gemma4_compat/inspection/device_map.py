"""Check a device map against a model before loading: placement, sizes and traps.

``check_device_map`` is also the command ``gemma4-compat map MODEL --map MAP``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..files.checkpoint import Location
from ..files.hub import short_name
from ..model.device_maps import checked_map, closest, covering, device_label, left_out
from ..results.result import Result
from ..results.text import size, some, table, wrap
from .mapped import Mapped
from .traps import Trap, traps_of


@dataclass(frozen=True)
class DeviceMapCheck(Result):
    """The effects of a device map.  All sizes are in bytes, by "nf4", "int8" and "bf16".
    Those of a QAT checkpoint are by "QAT" only, those of compressed-tensors by "bf16".

    ``entries`` are in the map's order.  ``devices`` are the sizes on each device after loading.
    ``saves`` is the GPU memory that offloading saves.  ``unknown`` maps the entries that name
    nothing in the model to the most similar name.  ``uncovered`` are the outermost modules that no
    entry places.
    """

    model: str
    architecture: str
    device_map: Mapping[str, int | str]
    unknown: Mapping[str, str | None]
    uncovered: tuple[str, ...]
    entries: Mapping[str, Mapping[str, int]]
    devices: Mapping[str, Mapping[str, int]]
    saves: Mapping[str, int]
    traps: tuple[Trap, ...]

    @property
    def ok(self) -> bool:
        """No entry is unknown, no module is uncovered, and no trap is an error or a warning."""
        only_notes = all(trap.level == "note" for trap in self.traps)
        return not self.unknown and not self.uncovered and only_notes

    @property
    def verdict(self) -> str:
        if self.uncovered:
            return 'this map does not work: add "": 0, or another device for the rest'
        if any(trap.level == "error" for trap in self.traps):
            return "this map does not work"
        if not self.ok:
            names = some(list(self.unknown), 3)
            what_to_do = f"correct or remove {names}" if names else "see the warning above"
            return f"this map works, but not as written: {what_to_do}"
        return "fine"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def _lines(self) -> Iterator[str]:
        yield wrap(f"{short_name(self.model)} ({self.architecture})")
        yield ""
        quants = list(self.saves)
        rest = '"" (the rest)' if len(self.entries) > 1 else '""'
        rows = [
            (key or rest, device_label(self.device_map[key]), *_cells(sizes))
            for key, sizes in self.entries.items()
        ]
        if not self.uncovered:  # a total would lack the uncovered modules
            rows.append(("",) * (2 + len(quants)))
            rows += [("loaded", device, *_cells(sizes)) for device, sizes in self.devices.items()]
            if any(self.saves.values()):
                rows.append(("saved on the GPU", "", *_cells(self.saves)))
        yield table(rows, ["entry", "on", *quants], right=range(2, 2 + len(quants)))
        yield ""
        messages = [wrap(text, " " * 9, f"{kind:<9}") for kind, text in _messages(self)]
        if messages:
            yield from (*messages, "")
        yield wrap(self.verdict)


def check_device_map(model: Location, device_map: Mapping[str, Any]) -> DeviceMapCheck:
    """Check a device map against a model's module names and sizes; no weight is read.

    Args:
        model: a folder with ``config.json``, or a Hub id such as "google/gemma-4-E4B-it" (or with a
            revision, "google/gemma-4-E4B-it@main").  The map is for the base model's
            ``from_pretrained``.  Given to PEFT, a ``device_map`` has no effect (without
            ``peft_redispatch``, PEFT dispatches the whole model again).
        device_map: module names to devices: GPU numbers, "cuda:1", "cpu", "disk" or a
            ``torch.device``.

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
    mapped = Mapped(model, given)
    unknown = [key for key in mapped.unknown() if not left_out(mapped.model, key)]
    return DeviceMapCheck(
        model=str(model),
        architecture=type(mapped.model).__name__,
        device_map=given,
        unknown={key: closest(key, list(mapped.modules)) for key in unknown},
        uncovered=tuple(mapped.uncovered()),
        entries=mapped.entries(),
        devices=mapped.devices(),
        saves=mapped.saves(),
        traps=tuple(traps_of(mapped)),
    )


# -- what is printed ------------------------------------------------------------------------------


def _cells(numbers: Mapping[str, int]) -> Iterator[str]:
    """Sizes in at most eight characters: the longest module name and three sizes fit in a line."""
    for number in numbers.values():
        text = size(abs(number))
        if len(text) > 8:
            digits, unit = text.split()
            text = f"{float(digits):.{max(0, 3 - digits.index('.'))}f} {unit}"
        yield f"-{text}" if number < 0 else text


def _messages(check: DeviceMapCheck) -> Iterator[tuple[str, str]]:
    for key, name in check.unknown.items():
        text = f"{key} is not a module of this model: this entry has no effect"
        if name:
            entry = covering(name, check.device_map)
            device = "cpu" if entry is None else check.device_map[entry]
            text += f"; the closest name is {name}, which is on {device_label(device)}"
        yield "unknown", text
    if check.uncovered:
        names = some(check.uncovered, 8)
        yield "missing", f"{names}: no entry. Loading raises, or they stay on the CPU without hooks"
    for trap in check.traps:
        yield trap.level, trap.text
