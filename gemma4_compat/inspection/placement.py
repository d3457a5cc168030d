"""The result of `inspect_model`, and how it is printed."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..html import coloured
from ..html import table as html_table
from ..result import Result
from ..text import plural, size, table, wrap

DISK = "disk"
_MOST_NAMES = 3
_VERDICTS = ("problem", "fine")


@dataclass(frozen=True)
class PartPlacement:
    """A part of the model; devices are "cuda:0", "cpu" or "disk".

    ``linear`` counts its linear layers by "4-bit", "8-bit", "bf16"...  ``weights`` and
    ``quant_state`` are bytes by the device that stores them.  ``computes_on`` are the execution
    devices, ``offloaded`` is the number of modules that accelerate onloads for each forward.
    """

    name: str
    linear: Mapping[str, int]
    weights: Mapping[str, int]
    quant_state: Mapping[str, int]
    computes_on: tuple[str, ...]
    offloaded: int


@dataclass(frozen=True)
class Offloaded:
    """The number of modules with weights on ``rests_on`` that execute on ``computes_on``."""

    modules: int
    rests_on: str
    computes_on: str


@dataclass(frozen=True)
class AdapterPlacement:
    """An adapter: bytes by part of the model and device.

    ``on_meta`` are its tensors without values.  ``elsewhere`` are the tensors that are not on the
    device that their layer computes on.
    """

    name: str
    kind: str
    active: bool
    parts: Mapping[str, Mapping[str, int]]
    on_meta: tuple[str, ...]
    elsewhere: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """A problem, the modules or tensors that have it, and the patch that prevents it."""

    text: str
    modules: tuple[str, ...]
    patch: str | None = None


@dataclass(frozen=True)
class ModelInspection(Result):
    """The placement of a loaded model, and what is wrong with it; see `inspect_model`.

    ``page_locked`` is host memory in bytes, ``input_device`` where the inputs belong.
    """

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
        """Whether nothing is damaged or misplaced."""
        return not self.problems

    @property
    def bytes(self) -> dict[str, int]:
        """The size of the whole model by device: weights, quant states and adapters."""
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
        messages = [wrap(text, " " * 9, f"{kind:<9}") for kind, text in _messages(self)]
        return "\n".join([*lines, "", *messages])

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
    """A sort key: devices that compute come first, then the CPU, the disk and meta."""
    last = ("cpu", DISK, "meta")
    return (last.index(device) + 1 if device in last else 0), device


# -- what is printed ------------------------------------------------------------------------------


def _title(result: ModelInspection) -> Iterator[str]:
    name = result.base if result.model == result.base else f"{result.base} in {result.model}"
    yield name
    yield result.quantisation or "not quantised"
    if result.input_device is not None:
        yield f"inputs go to {result.input_device}"


_Table = tuple[list[str], list[list[str]], tuple[int, ...]]


def _tables(result: ModelInspection) -> Iterator[_Table]:
    rows = []
    for part in result.parts:
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
    for device, number in result.bytes.items():
        rows.append([total, "", "", _place(device), size(number), ""])
        total = ""
    head = ["part", "linear layers", "runs on", "stored on", "weights", "quant"]
    if not any(part.quant_state for part in result.parts):
        head, rows = head[:-1], [row[:-1] for row in rows]
    yield head, rows, (4, 5)
    rows = []
    for adapter in result.adapters:
        label = f"{adapter.name} ({adapter.kind}{'' if adapter.active else ', not active'})"
        for part_name, by_device in adapter.parts.items():
            for device, number in by_device.items():
                rows.append([label, part_name, _place(device), size(number)])
                label = ""
    if rows:
        yield ["adapter", "part", "stored on", "weights"], rows, (3,)


def _place(device: str) -> str:
    return "no values" if device == "meta" else device


def _messages(result: ModelInspection) -> Iterator[tuple[str, str]]:
    for problem in result.problems:
        names = _some(problem.modules)
        patch = f" [{problem.patch}]" if problem.patch else ""
        yield "problem", f"{problem.text}{patch}: {names}"
    for each in result.offloaded:
        what = plural(each.modules, "module")
        where = f"weights on {each.rests_on}, execution device {each.computes_on}"
        yield "offload", f"{what}: {where} (accelerate's hooks)"
    if result.decoding is not None:
        yield "decoding", result.decoding
    if result.page_locked:
        yield "locked", f"{size(result.page_locked)} of host memory is page-locked for the GPU"
    for note in result.notes:
        yield "note", note
    if result.ok:
        yield "fine", "nothing is damaged or misplaced"


def _some(names: Iterable[str]) -> str:
    names = [name.removeprefix("base_model.model.") for name in names]  # PEFT's prefix
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _html(result: ModelInspection) -> Iterator[str]:
    yield f"<p><b>{'<br>'.join(map(html.escape, _title(result)))}</b></p>"
    for head, rows, right in _tables(result):
        yield html_table(rows, head, right)
    yield "<ul>"
    for kind, text in _messages(result):
        name = coloured(kind, kind == "fine") if kind in _VERDICTS else f"<b>{kind}</b>"
        yield f"<li>{name} {html.escape(text)}</li>"
    yield "</ul>"
