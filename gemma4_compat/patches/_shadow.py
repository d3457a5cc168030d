"""Give one object other attributes, or fewer, for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def shadowed(instance: Any, **attributes: Any) -> Iterator[None]:
    """Shadow class attributes, or replace instance attributes, of this one instance.

    Writes to ``vars(instance)`` so that neither properties nor ``nn.Module.__setattr__`` see it.
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
    """Take attributes that this instance has of its own away."""
    own = vars(instance)
    before = {name: own.pop(name) for name in attributes if name in own}
    try:
        yield
    finally:
        own.update(before)
