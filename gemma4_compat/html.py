"""HTML for notebooks: the text of a result, with its tables as tables and its verdict in colour.

Colours and backgrounds come from the notebook's theme, light or dark.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterator, Sequence

from .text import Table

_GREEN, _RED = "#2da44e", "#e5534b"  # readable on white and on black
_CELL = "padding: 2px 10px; border-bottom: 1px solid rgba(128, 128, 128, 0.4)"
# JupyterLab shows <pre> in the font of the text, and without a margin
_TEXT = "font: 13px/1.35 var(--jp-code-font-family, monospace); margin: 0.5em 0"
_CODE = f"{_TEXT}; padding: 6px 10px; background: rgba(128, 128, 128, 0.12); overflow-x: auto"


def page(text: str, tables: Sequence[Table], code: str, verdict: str, ok: bool) -> str:
    """The text as HTML; ``tables``, ``code`` and ``verdict`` are parts of it."""
    return "\n".join(_blocks(text, tables, code, verdict, ok))


def table(rows: Sequence[Sequence[object]], head: Sequence[str], right: Collection[int]) -> str:
    """A table.  ``right`` are the columns that are aligned to the right."""
    lines = ['<table style="border-collapse: collapse">']
    if any(head):
        lines.append(f"<thead>{_row('th', head, right)}</thead>")
    lines.append("<tbody>")
    lines += (_row("td", row, right) for row in rows)
    return "\n".join([*lines, "</tbody>", "</table>"])


def coloured(verdict: str, ok: bool) -> str:
    """The verdict in green or red."""
    return f'<b style="color: {_GREEN if ok else _RED}">{html.escape(verdict)}</b>'


def _row(tag: str, cells: Sequence[object], right: Collection[int]) -> str:
    row = ""
    for number, cell in enumerate(cells):
        align = "right" if number in right else "left"
        row += f'<{tag} style="text-align: {align}; {_CELL}">{html.escape(str(cell))}</{tag}>'
    return f"<tr>{row}</tr>"


def _blocks(text: str, tables: Sequence[Table], code: str, verdict: str, ok: bool) -> Iterator[str]:
    for each in tables:
        before, found, after = text.partition(each.printed)
        if found:
            yield from _prose(before, code, verdict, ok)
            yield table(each.rows, each.head, each.right)
            text = after
    yield from _prose(text, code, verdict, ok)


def _prose(text: str, code: str, verdict: str, ok: bool) -> Iterator[str]:
    before, found, after = text.partition(code) if code else (text, "", "")
    if found:
        yield from _prose(before, "", verdict, ok)
        yield f'<pre style="{_CODE}; white-space: pre">{html.escape(code)}</pre>'
        text = after
    if stripped := text.strip("\n"):
        escaped = html.escape(stripped)
        if verdict:
            escaped = escaped.replace(html.escape(verdict), coloured(verdict, ok), 1)
        yield f'<pre style="{_TEXT}; white-space: pre-wrap">{escaped}</pre>'
