"""HTML for notebooks: the text of a result, with its tables as tables and its verdict in colour.

Colours and backgrounds come from the notebook's theme, light or dark.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Sequence

from .text import Table

_GREEN, _RED = "#2da44e", "#e5534b"  # readable on white and on black
_CELL = "padding: 2px 10px; border-bottom: 1px solid rgba(128, 128, 128, 0.4)"
# JupyterLab shows <pre> in the font of the text, and without a margin
_TEXT = "font: 13px/1.35 var(--jp-code-font-family, monospace); margin: 0.5em 0"
_PROSE = f'<pre style="{_TEXT}; white-space: pre-wrap">'
_CODE = (
    f'<pre style="{_TEXT}; padding: 6px 10px; background: rgba(128, 128, 128, 0.12); '
    'overflow-x: auto; white-space: pre">'
)


def page(text: str, tables: Sequence[Table], code: str, verdict: str, ok: bool) -> str:
    """The text as HTML; ``tables``, ``code`` and ``verdict`` are parts of it."""
    shown = html.escape(text)
    if verdict:  # the last text of its kind: a table above may have the same words
        before, found, after = shown.rpartition(html.escape(verdict))
        shown = before + (coloured(verdict, ok) if found else "") + after
    blocks = [(each.printed, table(each.rows, each.head, each.right)) for each in tables]
    blocks.append((code, f"{_CODE}{html.escape(code)}</pre>"))
    for printed, block in blocks:
        if printed:
            shown = shown.replace(html.escape(printed), f"</pre>\n{block}\n{_PROSE}", 1)
    shown = re.sub(f"({re.escape(_PROSE)})\n+", r"\1", f"{_PROSE}{shown}</pre>")
    return re.sub(r"\n+</pre>", "</pre>", shown).replace(f"{_PROSE}</pre>", "").strip()


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
