"""What a command shows only on a terminal."""

from __future__ import annotations

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
