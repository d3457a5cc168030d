"""Finds references to a function.  They still point to it after it is replaced."""

from __future__ import annotations

import gc
import sys
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


def counts(functions: Sequence[Any]) -> list[int]:
    """How many references exist to each of the functions: equal at two times if none was added."""
    return [sys.getrefcount(function) for function in functions]


def count(
    holders: Iterable[Any], functions: Collection[int], expected: Collection[int] = ()
) -> Counter[int]:
    """How many references the holders still have to each of the functions, which are ids.

    ``expected`` are the ids of the holders that may keep referring to them.
    """
    unexpected = [holder for holder in holders if id(holder) not in expected]
    referents = (id(each) for holder in unexpected for each in gc.get_referents(holder))
    return Counter(each for each in referents if each in functions)
