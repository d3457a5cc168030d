"""Preserves the state of torch's random number generator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore torch's CPU generator after the block: creating a layer draws random numbers."""
    torch = sys.modules.get("torch")
    state = getattr(torch, "get_rng_state", lambda: None)()
    try:
        yield
    finally:
        if state is not None:
            torch.set_rng_state(state)  # type: ignore[union-attr]
