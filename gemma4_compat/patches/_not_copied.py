"""Attributes of one model in one process, which a copy or a pickle of the model does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._fork import ForkableLock

_attaching = ForkableLock()


class NotCopied:
    """Becomes ``None`` in a deep copy and in a pickle, so that neither needs this package."""

    def __reduce__(self) -> Any:
        return type(None), ()


def attached(owner: Any, name: str, make: Callable[[], Any]) -> Any:
    """The attribute ``name``, created by ``make`` at the first call.

    A copy of the owner gets its own.
    """
    own = vars(owner)
    value = own.get(name)
    if value is None:
        made = make()
        with _attaching.now:
            value = own.get(name)
            if value is None:
                value = own[name] = made
    return value
