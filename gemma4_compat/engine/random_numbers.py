"""Keeping the user's random numbers as they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Undo what the block does to torch's random numbers on the CPU: a new layer draws some."""
    torch = sys.modules.get("torch")
    state = getattr(torch, "get_rng_state", lambda: None)()
    try:
        yield
    finally:
        if state is not None:
            torch.set_rng_state(state)  # type: ignore[union-attr]
