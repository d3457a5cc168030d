"""The engine's error, and what its messages suggest."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class PatchError(RuntimeError):
    """A patch failed or drifted.  Raised instead of a warning in strict mode."""


def suggestion(name: str, names: Collection[str]) -> str:
    """ " (did you mean NAME?)", or "" if no name is similar."""
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
