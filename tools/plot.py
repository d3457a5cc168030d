"""Draws the README's plot, the speed of decoding, from the table in ``benchmarks/DECODING.md``.

    python tools/plot.py

Writes ``benchmarks/plot.svg``.  Its gray is readable on a light and on a dark page.
"""

from __future__ import annotations

import re
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
#: the start of the table's rows that are drawn
ROWS = "E2B, all on the GPU, newest"
LINES = {
    "default: dynamic cache": "#9aa0a6",
    "static cache, import alone: upstream's bits": "#2166ac",
    'static cache, install("fast")': "#d6604d",
}
_LEFT, _TOP, _WIDTH, _HEIGHT, _STEP = 60, 112, 780, 230, 190  # in pixels; _STEP is for a context


def figures(text: str) -> list[tuple[int, float | None, float | None, float | None]]:
    """Tokens of context, and for each of ``LINES`` the tokens a second, if they were measured."""
    table = ([c.strip(" *") for c in line.strip("|").split("|")] for line in text.splitlines())
    rows = [cells for cells in table if len(cells) == 6 and cells[0] == ROWS]
    found = [[float(c) if c[0].isdigit() else None for c in cells[2:]] for cells in rows]
    return [(int(c[1]), f[0], f[2], f[3]) for c, f in zip(rows, found, strict=True)]


def drawing(text: str) -> str:
    """The plot as SVG."""
    machine = re.search(r"^NVIDIA \w+", text, re.MULTILINE)
    assert machine is not None
    rows = figures(text)
    scale = _HEIGHT / max(speed or 0 for _, *speeds in rows for speed in speeds)
    places = [_LEFT + 40 + _STEP * number for number in range(len(rows))]
    body = [f'<text x="10" y="22" font-size="15">Gemma 4 E2B in NF4 on one {machine[0]}']
    body[0] += ", tokens a second, by tokens of context</text>"
    for number, (name, color) in enumerate(LINES.items()):
        y = 36 + 18 * number
        body.append(f'<rect x="10" y="{y}" width="12" height="12" fill="{color}"/>')
        body.append(f'<text x="28" y="{y + 11}">{name}</text>')
        spots = [
            (x, round(_TOP + _HEIGHT - speed * scale), speed)
            for x, row in zip(places, rows, strict=True)
            if (speed := row[1 + number]) is not None
        ]
        points = " ".join(f"{x},{y}" for x, y, _ in spots)
        body.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>'
        )
        for x, y, speed in spots:
            body.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}"/>')
            body.append(f'<text x="{x}" y="{y - 8}" text-anchor="middle">{speed:.0f}</text>')
    bottom = _TOP + _HEIGHT
    body.append(f'<path d="M{_LEFT} {bottom}H{_WIDTH - 20}" stroke="#808890"/>')
    for x, (tokens, *_) in zip(places, rows, strict=True):
        body.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{tokens:,}</text>')
    size = f'width="{_WIDTH}" height="{bottom + 30}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} fill="#808890" '
    return "\n".join([head + 'font-family="sans-serif" font-size="12">', *body, "</svg>", ""])


def main() -> None:
    text = (BENCHMARKS / "DECODING.md").read_text(encoding="utf-8")
    (BENCHMARKS / "plot.svg").write_text(drawing(text), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
