"""Replaces or removes attributes of one object for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def shadowed(instance: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of this instance; restore the old ones, or the class's, at the end.

    Writes to ``vars(instance)``, past properties and ``nn.Module.__setattr__``.
    """
    own = vars(instance)
    before = {name: own.get(name, _ABSENT) for name in attributes}
    own.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value


@contextmanager
def hidden(instance: Any, *attributes: str) -> Iterator[None]:
    """Remove attributes from ``vars(instance)``, so that those of the class apply."""
    own = vars(instance)
    before = {name: own.pop(name) for name in attributes if name in own}
    try:
        yield
    finally:
        own.update(before)
