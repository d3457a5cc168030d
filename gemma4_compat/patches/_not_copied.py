"""What belongs to one process and one model: a copy or a pickle of the model goes without it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_attaching = threading.Lock()


class NotCopied:
    """``None`` in a deep copy and in a pickle, which then do not name this package."""

    def __reduce__(self) -> Any:
        return type(None), ()


def attached(owner: Any, name: str, make: Callable[[], Any]) -> Any:
    """The attribute of this name, made at the first call; a copy of the owner gets its own."""
    own = vars(owner)
    if own.get(name) is None:
        with _attaching:
            if own.get(name) is None:
                own[name] = make()
    return own[name]
