"""The result of merging, and its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..results.result import Result
from ..results.text import command_line, shortened, table, wrap


@dataclass(frozen=True)
class Parity:
    """The comparison of the merged model with the adapted model on one prompt.

    ``effect`` is the change of the logits by the adapter, ``difference`` that by merging.  Both are
    the 2-norm of the change of a position's logits, divided by the 2-norm of these logits, at the
    worst position.  ``tolerance`` is twice the measured change by one more rounding of the adapted
    layers' outputs, and 0.5 at most.  ``other_tokens`` counts the positions at which the merged
    model's most likely token differs.  ``undecided`` counts those of them at which the adapted
    model's two most likely tokens are closer than the tolerance.
    """

    prompt: str
    positions: int
    effect: float
    difference: float
    tolerance: float
    other_tokens: int
    undecided: int

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance and self.other_tokens == self.undecided


@dataclass(frozen=True)
class MergeResult(Result):
    """What was merged into what, and the comparison of the models."""

    base: str
    adapter: str
    out: Path
    parity: tuple[Parity, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the merged model agrees with the adapter on every prompt."""
        return all(row.ok for row in self.parity)

    @property
    def verdict(self) -> str:
        if self.ok:
            return f"merged into {self.out}"
        return "the merged model does not agree with the adapter"

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "ok": row.ok} for row in self.parity]
        return {**asdict(self), "out": str(self.out), "parity": rows, "ok": self.ok}

    def _lines(self) -> Iterator[str]:
        yield table([_cells(row) for row in self.parity], _HEAD, right=(1, 2, 3))
        yield ""
        yield wrap(_LEGEND)
        for note in self.notes:
            yield wrap(note, " " * 6, "note: ")
        yield ""
        yield self.verdict
        if self.ok:
            yield ""
            plan = command_line("gemma4-compat", "plan", str(self.out))
            yield f"{plan} prints code that loads it on your GPU"


_HEAD = ("prompt", "adapter", "merging", "tolerance", "other tokens", "")
_LEGEND = (
    "adapter: how much the adapter changes the logits, at the worst token. merging: how much the "
    "merged model's logits differ from those of the model with the adapter. tolerance: the most "
    "that rounding explains. other tokens: how often another token is the most likely one; it is "
    "undecided if rounding explains that."
)


def _cells(row: Parity) -> tuple[str, ...]:
    undecided = f" ({row.undecided} undecided)" if row.undecided else ""
    return (
        shortened(" ".join(row.prompt.split()), 20),
        _percent(row.effect),
        _percent(row.difference),
        _percent(row.tolerance),
        f"{row.other_tokens} of {row.positions}{undecided}",
        "agrees" if row.ok else "DISAGREES",
    )


def _percent(share: float) -> str:
    """ "70 %", "3.2 %", "0.0012 %"; infinity if a value is not finite."""
    return f"{100 * share:.0f} %" if share >= 1 else f"{100 * share:.2g} %"
