"""Plain text for a terminal: tables, sizes and paragraphs, as wide as the terminal is."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from itertools import zip_longest

#: a table: its text, its rows, its head, and the columns that are aligned to the right
Table = tuple[str, Sequence[Sequence[object]], Sequence[str], Collection[int]]
#: a list to which `table` adds each table that it returns; with it, nothing is wrapped
recorded: ContextVar[list[Table] | None] = ContextVar("recorded", default=None)


def size(number: int) -> str:
    """Bytes as "1.23 GiB", "4.5 MiB", "6.0 KiB" or "78 B"."""
    for unit, digits, power in (("GiB", 2, 30), ("MiB", 1, 20), ("KiB", 1, 10)):
        if number >= 2**power:
            return f"{number / 2**power:.{digits}f} {unit}"
    return f"{number} B"


def plural(number: int, noun: str) -> str:
    """ "1 tensor", "2 tensors", "1,234 tensors"."""
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


def some(names: Sequence[str], most: int = 12) -> str:
    """The first ``most`` names with commas between them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def command_line(*words: str) -> str:
    """A command to copy into a shell; words with spaces are quoted."""
    import shlex
    import subprocess

    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def table(
    rows: Sequence[Sequence[object]],
    head: Sequence[str] = (),
    *,
    right: Sequence[int] = (),
    indent: str = "",
) -> str:
    """Rows in two or more columns, two spaces apart.

    If a row is too wide, its last cell is wrapped, and its first cell, too, if that is not enough.
    Words are not broken: names can be copied.  If that is not enough either, the last cell is
    printed below the others.  A no-break space in the last cell keeps two words on one line, and
    is printed as a space.  ``right`` are the columns that are aligned to the right.
    """
    lines = [[str(cell) for cell in row] for row in ([head] if head else []) + list(rows)]
    most = _columns()
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    others = len(indent) + sum(widths[1:-1]) + 2 * (len(widths) - 1)
    widths[-1] = min(widths[-1], max(most - others - widths[0], 24))
    longest = max(len(word) for line in lines for word in line[0].split() or [""])
    room = max(most - others - widths[-1], 16)
    widths[0] = min(widths[0], max(longest, room))
    below = others + widths[0] + widths[-1] > most and len(widths) - 1 not in right
    printed = []
    for line in lines:
        first = textwrap.wrap(line[0], widths[0], break_long_words=False)
        last = textwrap.wrap(line[-1], max(widths[-1], 1), break_long_words=False)
        both = zip_longest(first or [""], [] if below else last, fillvalue="")
        for number, (start, end) in enumerate(both):
            middle = line[1:-1] if number == 0 else [""] * (len(line) - 2)
            cells = zip([start, *middle, end], widths, strict=True)
            aligned = (
                f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
                for column, (cell, width) in enumerate(cells)
            )
            printed.append(indent + "  ".join(aligned))
        if below and line[-1]:
            printed.append(wrap(line[-1], f"{indent}    "))
    text = "\n".join(each.rstrip().replace("\xa0", " ") for each in printed)
    if (tables := recorded.get()) is not None:
        tables.append((text, rows, head, right))
    return text


def shortened(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, with "..." in place of its middle."""
    if len(text) <= width:
        return text
    kept = max(width - 3, 2)
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def wrap(text: str, indent: str = "", first: str | None = None, *, breaks: bool = False) -> str:
    """One paragraph; its first line starts with ``first``, the others with ``indent``.

    Words are not broken unless ``breaks`` is true, so that paths and names can be copied.
    """
    return textwrap.fill(
        text,
        _columns(),
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=breaks,
        break_on_hyphens=False,
    )


def words(text: str) -> str:
    """A regular expression for a text that may be wrapped."""
    return r"\s+".join(map(re.escape, text.split()))


def _columns() -> int:
    return shutil.get_terminal_size().columns if recorded.get() is None else sys.maxsize
