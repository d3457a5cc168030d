"""Colour, where the terminal shows it."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}


def coloured(text: str, colour: str, stream: TextIO | None = None) -> str:
    """``text`` in "red", "green", "yellow" or "bold" where ``stream`` (stdout) shows colours."""
    return f"\033[{_CODES[colour]}m{text}\033[0m" if shows_colour(stream) else text


def shows_colour(stream: TextIO | None = None) -> bool:
    """Whether the stream is a terminal, and neither NO_COLOR nor TERM=dumb says otherwise."""
    stream = sys.stdout if stream is None else stream
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()
