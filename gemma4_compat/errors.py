"""The errors that this package raises.

All are importable from ``gemma4_compat`` itself::

    try:
        plan("gemma-4-E2B-it", gpu="4GiB")
    except gemma4_compat.InputError as error:
        print(error)
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any


class InputError(ValueError):
    """A file or an argument cannot work.  The message is one line that names it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class MergeError(RuntimeError):
    """Merging an adapter failed, and nothing was written.

    ``result`` is the ``MergeResult`` with the comparison of the two models, if it was made.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class PatchError(RuntimeError):
    """Raised in place of a warning where the strict switch is on."""


def suggestion(name: str, names: Collection[str]) -> str:
    """ " (did you mean NAME?)", or nothing where no name is close."""
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def reason(error: BaseException) -> str:
    """What another library's error says, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
