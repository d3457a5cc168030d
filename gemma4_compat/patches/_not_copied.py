"""What belongs to one process and one model: a copy or a pickle of the model goes without it."""

from __future__ import annotations

from typing import Any


class NotCopied:
    """``None`` in a deep copy and in a pickle, which then do not name this package."""

    def __reduce__(self) -> Any:
        return type(None), ()
