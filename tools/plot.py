"""Draws the README's plot, the speed of decoding, from the table in ``benchmarks/DECODING.md``.

    python tools/plot.py

Writes ``benchmarks/plot.svg``.  Its grey is readable on a light and on a dark page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
#: the start of a row in the table -> its label
ROWS = {
    "all on the GPU, newest": "E2B, all on the GPU",
    "PLE on the CPU, LoRA adapter, newest": "E2B, per-layer embeddings on the CPU, adapter",
    "E4B, all on the GPU, newest": "E4B, all on the GPU",
    "E4B, PLE on the CPU, LoRA adapter, newest": "E4B, per-layer embeddings on the CPU, adapter",
}
COLOURS = {"default (dynamic cache)": "#9aa0a6", "static cache, captured as CUDA graphs": "#2166ac"}
_LEFT, _SCALE, _WIDTH = 350, 1.3, 780  # in pixels; the scale is per token a second


def figures(text: str) -> Iterator[tuple[str, float, float]]:
    """The label, and the speeds with a dynamic cache and captured, of each row of the plot."""
    for line in text.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0] in ROWS:
            yield f"{ROWS[cells[0]]}, {cells[1]} tokens", float(cells[2]), float(cells[4])


def drawing(text: str) -> str:
    """The plot as SVG."""
    machine = re.search(r"^NVIDIA \w+", text, re.MULTILINE)
    assert machine is not None
    body = [f'<text x="10" y="22" font-size="15">Gemma 4 in NF4 on one {machine[0]}']
    body[0] += ", tokens a second, after a context of 64 or 1500 tokens</text>"
    x = 10
    for name, colour in COLOURS.items():
        body.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/>')
        body.append(f'<text x="{x + 18}" y="47">{name}</text>')
        x += 190
    y = 66
    for label, *speeds in figures(text):
        body.append(f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">{label}</text>')
        for speed, colour in zip(speeds, COLOURS.values(), strict=True):
            width = speed * _SCALE
            body.append(
                f'<rect x="{_LEFT}" y="{y}" width="{width:.0f}" height="11" fill="{colour}"/>'
            )
            body.append(f'<text x="{_LEFT + width + 6:.0f}" y="{y + 10}">{speed:g}</text>')
            y += 12
        y += 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" fill="#808890" '
    return "\n".join([head + 'font-family="sans-serif" font-size="12">', *body, "</svg>", ""])


def main() -> None:
    text = (BENCHMARKS / "DECODING.md").read_text(encoding="utf-8")
    (BENCHMARKS / "plot.svg").write_text(drawing(text), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
