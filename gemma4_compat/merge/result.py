"""What merging found, as the user reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Parity:
    """One prompt's comparison of the merged model with the one that has the adapter loaded.

    ``effect`` is what the adapter changes, ``difference`` what merging changes: the 2-norm of the
    change of one position's logits over that of the logits, at the worst position.  ``tolerance``
    is twice what one more rounding of the adapted layers' outputs changes, as measured, and 0.5
    at most.
    ``other_tokens`` counts positions where the merged model's most likely token is another one;
    ``undecided`` those among them where the adapter's own two most likely tokens are closer than
    the tolerance.
    """

    prompt: str
    positions: int
    effect: float
    difference: float
    tolerance: float
    other_tokens: int
    undecided: int

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance and self.other_tokens == self.undecided


@dataclass(frozen=True)
class MergeResult:
    """What was merged, and how well."""

    base: str
    adapter: str
    out: Path
    dtype: str
    parity: tuple[Parity, ...]
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.parity)

    def __str__(self) -> str:
        head = ("prompt", "adapter changes", "merging changes", "tolerance", "other tokens", "")
        rows = [head, *(_cells(row) for row in self.parity)]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            first, *rest = (f"{c:<{w}}" for c, w in zip(row, widths, strict=True))
            lines.append("  ".join([first, *rest]).rstrip())
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _cells(row: Parity) -> tuple[str, ...]:
    undecided = f" ({row.undecided} undecided)" if row.undecided else ""
    return (
        row.prompt if len(row.prompt) <= 36 else f"{row.prompt[:33]}...",
        f"{row.effect:.2g}",
        f"{row.difference:.2g}",
        f"{row.tolerance:.2g}",
        f"{row.other_tokens} of {row.positions}{undecided}",
        "agrees" if row.agrees else "DISAGREES",
    )
