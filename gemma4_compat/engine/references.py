"""Who refers to a function: what replacing it does not reach."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .slots import Entry, Target


def holders(functions: Sequence[Any]) -> list[Any]:
    """What refers to these functions: bound methods, partials, closures, containers, classes.

    A scan of all objects, some 40 ms in a process with the usual libraries.
    """
    if not functions:
        return []
    arguments = tuple(functions)
    ours = (types.FrameType, Target, Entry)
    found = gc.get_referrers(*arguments)
    ignored = (id(functions), id(arguments))
    return [each for each in found if id(each) not in ignored and not isinstance(each, ours)]


def count_held(holders: Iterable[Any], rightful: Mapping[int, set[int]]) -> int:
    """How many references the holders still have, other than the rightful ones.

    ``rightful`` maps the identity of a function to those of the holders that go on to hold it.
    """
    return sum(
        id(holder) not in rightful[id(held)]
        for holder in holders
        for held in gc.get_referents(holder)
        if id(held) in rightful
    )
