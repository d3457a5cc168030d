"""Finds references to a function.  They still point to it after it is replaced."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Mapping, Sequence
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


def count_held(holders: Iterable[Any], expected: Mapping[int, set[int]]) -> int:
    """How many references the holders still have, without the expected ones.

    ``expected`` maps the id of a function to the ids of the objects that may keep referring to it.
    """
    return sum(
        id(holder) not in expected[id(held)]
        for holder in holders
        for held in gc.get_referents(holder)
        if id(held) in expected
    )
