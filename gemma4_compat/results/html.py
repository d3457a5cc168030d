"""HTML of a result for notebooks: the verdict, then its text, with its tables as tables.

Backgrounds and the colors of the text are those of the notebook's theme, light or dark.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from html import escape
from typing import Any

from .text import Table, recorded, words

# As readable on white as on the dark theme's #111.
_GREEN, _YELLOW, _RED = "#278a47", "#a06a00", "#dc3f38"
_LINE = "1px solid rgba(128, 128, 128, 0.4)"
# JupyterLab shows <pre> in the font of the text, and breaks its lines inside words.
_FONT = "font: 13px/1.4 var(--jp-code-font-family, monospace); margin: 0.5em 0"
_TEXT = f'<pre style="{_FONT}; white-space: pre-wrap; word-break: normal; max-width: 80ch">'
_CODE = f'<pre style="{_FONT}; white-space: pre; padding: 6px; border: {_LINE}; overflow-x: auto">'


def page(result: Any) -> str:
    """The HTML of a `Result`."""
    tables: list[Table] = []
    token = recorded.set(tables)
    try:
        text = str(result)
    finally:
        recorded.reset(token)
    blocks = [(table[0], _table_in_html(table)) for table in tables]
    if code := getattr(result, "code", ""):
        blocks.append((code, f"{_CODE}{escape(code)}</pre>"))
    lines = []
    if result.verdict:
        color = _GREEN if result.ok else _RED if result.exit_code else _YELLOW
        lines.append(f'<p><b style="color: {color}">{escape(result.verdict)}</b></p>')
        text = re.sub(f"^{words(result.verdict)}$\n?", "", text, count=1, flags=re.MULTILINE)
    for printed, block in sorted(blocks, key=lambda each: text.find(each[0])):
        before, found, after = text.partition(printed)
        if found:
            lines += (_prose(before), block)
            text = after
    return "\n".join(filter(None, (*lines, _prose(text))))


def _prose(text: str) -> str:
    return f"{_TEXT}{escape(text)}</pre>" if (text := text.strip("\n")) else ""


def _table_in_html(table: Table) -> str:
    _, rows, head, right = table
    lines = [_row("th", head, right)] if any(head) else []
    lines += (_row("td", row, right) for row in rows)
    return f'<table style="border-collapse: collapse">{"".join(lines)}</table>'


def _row(tag: str, cells: Sequence[object], right: Collection[int]) -> str:
    row = ""
    for number, cell in enumerate(cells):
        align = "right" if number in right else "left"
        style = f"text-align: {align}; padding: 2px 10px; border-bottom: {_LINE}"
        row += f'<{tag} style="{style}">{escape(str(cell))}</{tag}>'
    return f"<tr>{row}</tr>"
