"""What `inspect_model` found in a loaded model, and how that is printed."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..result import Result
from ..text import plural, size, table, wrap

DISK = "disk"
_MOST_NAMES = 3


@dataclass(frozen=True)
class PartPlacement:
    """A part of the model; devices as "cuda:0", "cpu" or "disk".

    ``linear`` counts its linear layers by "4-bit", "8-bit", "bf16"..., ``weights`` and
    ``quant_state`` are bytes by the device that they rest on.  ``computes_on`` is where accelerate
    brings what rests elsewhere, ``offloaded`` counts such modules.
    """

    name: str
    linear: Mapping[str, int]
    weights: Mapping[str, int]
    quant_state: Mapping[str, int]
    computes_on: tuple[str, ...]
    offloaded: int


@dataclass(frozen=True)
class Offloaded:
    """So many modules whose weights rest in one place and are brought to a device to compute."""

    modules: int
    rests_on: str
    computes_on: str


@dataclass(frozen=True)
class AdapterPlacement:
    """An adapter: bytes by part of the model and device.

    ``on_meta`` are its tensors without values, ``elsewhere`` those that are on another device than
    the one their layer computes on.
    """

    name: str
    kind: str
    active: bool
    parts: Mapping[str, Mapping[str, int]]
    on_meta: tuple[str, ...]
    elsewhere: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Something that does not work, the modules that it is about, and the patch that is for it."""

    text: str
    modules: tuple[str, ...]
    patch: str | None = None


@dataclass(frozen=True)
class ModelInspection(Result):
    """What `inspect_model` found."""

    model: str
    base: str
    quantisation: str | None
    device_map: Mapping[str, str] | None
    input_device: str | None
    decoding: str | None
    page_locked: int
    parts: tuple[PartPlacement, ...]
    offloaded: tuple[Offloaded, ...]
    adapters: tuple[AdapterPlacement, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Nothing is damaged, and all of it is where it should be."""
        return not self.problems

    @property
    def bytes(self) -> dict[str, int]:
        """All of it, by device: weights, quant states and adapters."""
        total: dict[str, int] = {}
        for part in self.parts:
            for by_device in (part.weights, part.quant_state):
                add_all(total, by_device)
        for adapter in self.adapters:
            for by_device in adapter.parts.values():
                add_all(total, by_device)
        return dict(sorted(total.items(), key=lambda item: order(item[0])))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": self.bytes, "ok": self.ok}

    def __str__(self) -> str:
        lines = [*_title(self)]
        for head, rows, right in _tables(self):
            lines += ["", table(rows, head, right=right)]
        told = [wrap(text, " " * 9, f"{kind:<9}") for kind, text in _messages(self)]
        return "\n".join([*lines, "", *told])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "\n".join(_html(self))


def add(total: dict[str, int], key: str, number: int) -> None:
    total[key] = total.get(key, 0) + number


def add_all(total: dict[str, int], numbers: Mapping[str, int]) -> None:
    for key, number in numbers.items():
        add(total, key, number)


def ordered(numbers: Mapping[str, int]) -> dict[str, int]:
    return {key: numbers[key] for key in sorted(numbers, key=order)}


def order(device: str) -> tuple[int, str]:
    """Devices that compute, the CPU, the disk."""
    last = ("cpu", DISK, "meta")
    return (last.index(device) + 1 if device in last else 0), device


# -- what is printed ------------------------------------------------------------------------------


def _title(found: ModelInspection) -> Iterator[str]:
    name = found.base if found.model == found.base else f"{found.base} in {found.model}"
    yield name
    yield found.quantisation or "not quantised"
    if found.input_device is not None:
        yield f"inputs go to {found.input_device}"


_Table = tuple[list[str], list[list[str]], tuple[int, ...]]


def _tables(found: ModelInspection) -> Iterator[_Table]:
    rows = []
    for part in found.parts:
        first = [
            part.name,
            ", ".join(f"{number} {kind}" for kind, number in part.linear.items()),
            ", ".join(part.computes_on),
        ]
        for device in sorted({*part.weights, *part.quant_state}, key=order):
            state = part.quant_state.get(device)
            weights = size(part.weights.get(device, 0))
            rows.append([*first, _place(device), weights, "" if state is None else size(state)])
            first = ["", "", ""]
    total = "all"
    for device, number in found.bytes.items():
        rows.append([total, "", "", _place(device), size(number), ""])
        total = ""
    head = ["part", "linear layers", "computes", "rests on", "weights", "quant"]
    yield head, rows, (4, 5)
    rows = []
    for adapter in found.adapters:
        label = f"{adapter.name} ({adapter.kind}{'' if adapter.active else ', not active'})"
        for part_name, by_device in adapter.parts.items():
            for device, number in by_device.items():
                rows.append([label, part_name, _place(device), size(number)])
                label = ""
    if rows:
        yield ["adapter", "part", "rests on", "weights"], rows, (3,)


def _place(device: str) -> str:
    return "lost" if device == "meta" else device


def _messages(found: ModelInspection) -> Iterator[tuple[str, str]]:
    for problem in found.problems:
        names = _some(problem.modules)
        patch = f" [{problem.patch}]" if problem.patch else ""
        yield "problem", f"{problem.text}{patch}: {names}"
    for each in found.offloaded:
        what = plural(each.modules, "module")
        where = f"{each.rests_on}, and computing on {each.computes_on}"
        yield "offload", f"{what} resting on {where} (accelerate's hooks)"
    if found.decoding is not None:
        yield "decoding", found.decoding
    if found.page_locked:
        yield "locked", f"{size(found.page_locked)} of host memory are page-locked, for the GPU"
    for note in found.notes:
        yield "note", note
    if found.ok:
        yield "fine", "nothing is damaged, all of it is where it should be"


def _some(names: Iterable[str]) -> str:
    names = [name.removeprefix("base_model.model.") for name in names]  # PEFT's
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _html(found: ModelInspection) -> Iterator[str]:
    yield f"<p><b>{'<br>'.join(map(html.escape, _title(found)))}</b></p>"
    for head, rows, right in _tables(found):
        yield "<table><thead><tr>"
        yield "".join(_cell("th", cell, number in right) for number, cell in enumerate(head))
        yield "</tr></thead><tbody>"
        for row in rows:
            cells = (_cell("td", cell, number in right) for number, cell in enumerate(row))
            yield f"<tr>{''.join(cells)}</tr>"
        yield "</tbody></table>"
    yield "<ul>"
    for kind, text in _messages(found):
        yield f"<li><b>{html.escape(kind)}</b> {html.escape(text)}</li>"
    yield "</ul>"


def _cell(tag: str, text: str, right: bool) -> str:
    return f'<{tag} style="text-align: {"right" if right else "left"}">{html.escape(text)}</{tag}>'
