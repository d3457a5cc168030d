"""Finds references to a function.  They still point to it after it is replaced."""

from __future__ import annotations

import gc
import types
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .slots import Entry, Slot, Target


def holders(functions: Sequence[Any]) -> list[Any]:
    """The objects that refer to these functions: bound methods, partials, closures, containers.

    This scans all objects, which takes about 40 ms in a process with the usual libraries.
    """
    if not functions:
        return []
    arguments = tuple(functions)
    ours = (types.FrameType, Target, Entry, Slot)
    referrers = gc.get_referrers(*arguments)
    ignored = (id(functions), id(arguments))
    return [each for each in referrers if id(each) not in ignored and not isinstance(each, ours)]


def count(holders: Iterable[Any], expected: Collection[int] = ()) -> Counter[int]:
    """How many references to each object, by id, the holders have; without the expected holders."""
    others = (holder for holder in holders if id(holder) not in expected)
    return Counter(id(each) for holder in others for each in gc.get_referents(holder))
