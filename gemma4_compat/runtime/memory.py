"""Which errors say that memory is short."""

from __future__ import annotations

import re


def is_short_of_memory(error: BaseException) -> bool:
    """Whether memory was short, which may pass."""
    text = f"{type(error).__name__}: {error}"
    short = "out of memory|MemoryError|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED"
    return re.search(short, text) is not None
