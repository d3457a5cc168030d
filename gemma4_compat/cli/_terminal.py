"""What a command shows only on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A block during which the terminal shows this line; nothing is shown if it is empty."""
    if not text or not sys.stderr.isatty():
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r" + " " * len(text), end="\r", file=sys.stderr, flush=True)


def shows_colour() -> bool:
    """Whether stdout is a terminal, and neither NO_COLOR nor TERM=dumb is set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout.isatty()
