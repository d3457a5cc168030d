"""The README's table of graphics cards: what ``gemma4-compat plan`` says of each.

    python tools/cards.py [README.MD]

Prints the table and, if the README is named, writes it there.  Takes some minutes.  The shapes of
the released models are in ``tests/shapes.py``.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gemma4_compat.model import parts
from gemma4_compat.planning import Plan, plan
from gemma4_compat.results.text import plural

CARDS = ("6GB", "8GB", "12GB", "16GB", "24GB")
JOBS = {"generate": False, "QLoRA": True}
_HEAD = """\
| card | E2B, generate | E2B, QLoRA | E4B, generate | E4B, QLoRA |
|---|---|---|---|---|"""


def table(folders: Mapping[str, Path]) -> str:
    """The table of the models in these folders, by name."""
    return "\n".join([_HEAD, *(row(card, folders) for card in CARDS)])


def row(card: str, folders: Mapping[str, Path]) -> str:
    """What ``plan`` says of one card."""
    cells = (
        cell(plan(folder, card, train=train))
        for folder in folders.values()
        for train in JOBS.values()
    )
    return f"| {card.replace('GB', ' GB')} | {' | '.join(cells)} |"


def cell(planned: Plan) -> str:
    """The memory that a plan needs, the longest context, and what else is on the CPU."""
    if not planned.ok:
        longest = planned.longest_context
        return f"{longest:,} tokens at most" if longest else "no"
    needed = f"{planned.needed[0] / 2**30:.1f} GiB"
    context = f"up to {planned.longest_context:,} tokens"
    return "; ".join([needed, context, *_offloaded(planned)])


def _offloaded(planned: Plan) -> Iterator[str]:
    """What is on the CPU beside the per-layer embeddings."""
    names = [name for name, device in planned.device_map.items() if device == "cpu"]
    layers = sum(parts.part_of(name) == parts.LAYERS for name in names)
    for part in (parts.VISION, parts.AUDIO):
        if any(parts.part_of(name) == part for name in names):
            yield f"{part} on the CPU"
    if layers:
        yield f"{plural(layers, 'decoder layer')} on the CPU"


def with_table(readme: str, rows: str) -> str:
    """The README with this table."""
    block = f"<!-- cards -->\n{rows}\n<!-- /cards -->"
    return re.sub(r"<!-- cards -->.*<!-- /cards -->", lambda _: block, readme, flags=re.DOTALL)


def main(argv: list[str]) -> None:
    from tests import shapes

    with tempfile.TemporaryDirectory() as folder:
        models = {"E2B": shapes.E2B_TEXT, "E4B": shapes.E4B_TEXT}
        folders = {
            name: shapes.write_config(Path(folder) / name, text, shapes.VISION, shapes.AUDIO)
            for name, text in models.items()
        }
        rows = table(folders)
    print(rows)
    for file in map(Path, argv):
        text = with_table(file.read_text(encoding="utf-8"), rows)
        file.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
