"""The tables of graphics cards in ``benchmarks/CARDS.md`` and the README.

    python tools/cards.py

Writes both from ``benchmarks/cards.jsonl``, which ``python -m benchmarks.cards`` makes.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cards import CARDS, JOBS, MODELS, Cell, read, same_plan  # noqa: E402

DATA, PAGE, README = (
    ROOT / "benchmarks/cards.jsonl",
    ROOT / "benchmarks/CARDS.md",
    ROOT / "README.md",
)
NAMES = {"e2b": "E2B", "e4b": "E4B", "12b": "12B", "26b": "26B-A4B", "31b": "31B"}
Lines = dict[Cell, dict[str, Any]]

_SHARED = "| model | card | layers on the CPU | planned GiB | peak GiB: tensors | reserved "
_WORK = (
    "| loading, s | CPU memory, GiB | longest context | over the link | GPU memory | operations |"
)
_HEADS = {
    "generate": f"{_SHARED}| tok/s: exact | fast | prompt, s: exact | fast {_WORK}",
    "QLoRA": f"{_SHARED}| s a step {_WORK}",
    "experts": f"{_SHARED}| s a step {_WORK}",
}
_TITLES = {
    "generate": "Generate at 32,768 tokens, with a static cache",
    "QLoRA": "QLoRA of 2,048 tokens",
    "experts": "QLoRA of 2,048 tokens, with LoRA on the experts, too",
}


# -- the page -------------------------------------------------------------------------------------


def page(lines: Lines) -> str:
    """The tables of CARDS.md."""
    text = []
    for job, head in _HEADS.items():
        text += [f"## {_TITLES[job]}", "", head, "|---|---" + "|---:" * (head.count("|") - 3) + "|"]
        for shape in MODELS:
            text += [_row(cards, lines, job) for cards in _alike(lines, shape, job)]
        text.append("")
    return "\n".join(text).rstrip()


def _alike(lines: Lines, shape: str, job: str) -> Iterator[list[dict[str, Any]]]:
    """The cells of a model and a job, those of cards with the same plan together."""
    own = [lines[shape, card, job] for card in CARDS if (shape, card, job) in lines]
    for _, group in itertools.groupby(own, lambda line: (line["fits"], line["cpu"])):
        yield list(group)


def _row(cards: list[dict[str, Any]], lines: Lines, job: str) -> str:
    names = [line["cell"][1].removesuffix("GB") for line in (cards[0], cards[-1])]
    first = f"| {NAMES[cards[0]['cell'][0]]} | {' to '.join(dict.fromkeys(names))} GB "
    if not cards[0]["fits"]:
        longest = max(line["context"] for line in cards)
        return f"{first}| {f'up to {longest:,} tokens' if longest else 'does not fit'} |"
    line = same_plan(cards[0], lines)
    cells = [str(layers(line)), f"{planned(line):.2f}"]
    if job == "generate":
        fast = measurement(lines, (*line["cell"][:2], "fast"))
        found = line if "reserved GiB" in line else fast
        cells += _figures(found, "allocated GiB", "reserved GiB")
        for name in ("tokens/s", "prompt s"):
            cells += [*_figures(line, name, digits=0), *_figures(fast, name, digits=0)]
    else:
        found = line
        cells += _figures(line, "allocated GiB", "reserved GiB", "s a step")
    cells += _figures(found, "load s", digits=0)
    longest = [f"{line['context']:,}" for line in (cards[0], cards[-1])]
    cells += [f"{sum(line['CPU'].values()):.1f}", " to ".join(dict.fromkeys(longest))]
    return f"{first}| {' | '.join([*cells, *work(line)])} |"


def _figures(line: dict[str, Any], *names: str, digits: int = 2) -> list[str]:
    unmeasured = "out of memory" if "OutOfMemory" in line.get("error", "") else "not measured"
    return [f"{line[name]:.{digits}f}" if name in line else unmeasured for name in names]


def layers(line: dict[str, Any]) -> int:
    """The number of decoder layers on the CPU."""
    return sum(".layers." in name for name in line["cpu"])


def planned(line: dict[str, Any]) -> float:
    """The planned GiB, without what is outside PyTorch."""
    sizes: dict[str, float] = line["GPU"]
    return sum(sizes.values()) - sizes["outside"]


def measurement(lines: Lines, cell: Cell) -> dict[str, Any]:
    """The line with the measurement of a cell; an empty one if no cell has this plan."""
    line = lines.get(cell, {"fits": False})
    return same_plan(line, lines) if line["fits"] else {}


def work(line: dict[str, Any]) -> list[str]:
    """What a token, or a step, moves over the link and in GPU memory, and computes."""
    own = line["parameters"]
    share = {place: line[place].get("decoder layers", 0.0) for place in ("CPU", "GPU")}
    dense = own["dense"] / own["layers"]
    if line["cell"][2] == "generate":
        used = own["used"] / own["layers"]
        memory = share["GPU"] * used + 2 * own["head"] / 2**30 + line["GPU"].get("kv_cache", 0.0)
        keys = 4 * JOBS["generate"]["context"] * own["attention"]
        operations = (2 * (own["used"] + own["head"]) + keys) / 1e9
        return [f"{share['CPU'] * used:.2f} GiB", f"{memory:.1f} GiB", f"{operations:.0f} G"]
    tokens = JOBS["QLoRA"]["context"]
    # A recomputation loads a layer again; the backward reads experts in place for a third time.
    link = share["CPU"] * (2 * dense + 3 * (1 - dense))
    # Three times, 4 bits are read and 16 written, then read by a product.
    memory = 3 * 4.5 * own["layers"] / 2**30
    operations = tokens * (6 * own["used"] + 4 * own["head"]) / 1e12
    return [f"{link:.1f} GiB", f"{memory:.0f} GiB", f"{operations:.0f} T"]


# -- the README -----------------------------------------------------------------------------------


def short(lines: Lines) -> str:
    """The table of the README."""
    text = [
        f"| | {' | '.join(card.replace('GB', ' GB') for card in CARDS)} |",
        "|---" * (len(CARDS) + 1) + "|",
    ]
    for shape in MODELS:
        pairs = [[_cell(lines, shape, card, job) for job in ("fast", "QLoRA")] for card in CARDS]
        cells = ["; ".join(dict.fromkeys(pair)) for pair in pairs]
        text.append(f"| {NAMES[shape]} | {' | '.join(cells)} |")
    cells = [_cell(lines, "26b", card, "experts") for card in CARDS]
    text.append(f"| {NAMES['26b']}, LoRA on the experts, too | {' | '.join(cells)} |")
    return "\n".join(text)


def _cell(lines: Lines, shape: str, card: str, job: str) -> str:
    line = lines[shape, card, job]
    if not line["fits"]:
        return f"{line['context']:,} tokens" if line["context"] else "no"
    found = same_plan(line, lines)
    if "tokens/s" in found:
        figure = f"{found['tokens/s']:.0f} tok/s"
    else:
        figure = f"{found['s a step']:.1f} s" if "s a step" in found else "planned"
    return f"{figure} ({layers(line)})" if layers(line) else figure


def with_table(text: str, rows: str) -> str:
    """A page with this table."""
    block = f"<!-- cards -->\n{rows}\n<!-- /cards -->"
    return re.sub(r"<!-- cards -->.*<!-- /cards -->", lambda _: block, text, flags=re.DOTALL)


def main(files: Iterable[tuple[Path, Any]] = ((PAGE, page), (README, short))) -> None:
    lines = read(DATA)
    for file, table in files:
        file.write_text(with_table(file.read_text("utf-8"), table(lines)), "utf-8")


if __name__ == "__main__":
    main()
