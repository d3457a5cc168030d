"""Other attributes of one object, for one call.

Code that only reads an object gets a ``variant`` of it.  Code that stores or changes the object
needs the object itself: its attributes are replaced for the length of a ``with`` block, and other
threads see the new ones during the block.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._fork import ForkableLock

_ABSENT = object()


def variant(instance: Any, **attributes: Any) -> Any:
    """A shallow copy of an object, with these attributes.

    The object itself does not change, so other threads, forks and copies of it do not notice.
    """
    copied = object.__new__(type(instance))
    vars(copied).update(vars(instance), **attributes)
    return copied


@contextmanager
def shadowed(instance: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of this instance; restore the old ones, or the class's, at the end.

    Writes to ``vars(instance)``, past properties and ``nn.Module.__setattr__``.  Blocks of several
    threads may overlap: the attribute has the value of the last block that has not ended, and its
    old value after all of them.  A value that other code sets during a block stays.
    """
    block = object()
    try:
        for name, value in attributes.items():
            _replace(instance, name, block, value)
        yield
    finally:
        for name in attributes:
            _put_back(instance, name, block)


def hidden(instance: Any, *names: str) -> Any:
    """A block without these attributes in ``vars(instance)``, so that those of the class apply."""
    return shadowed(instance, **{name: _ABSENT for name in names if name in vars(instance)})


class _Replaced:
    """An attribute of one instance that blocks have replaced."""

    def __init__(self, instance: Any, before: Any) -> None:
        self.instance, self.before = instance, before  # which keeps the id of the instance in use
        self.values: dict[object, tuple[int, Any]] = {}  # block -> its thread and its value


_lock = ForkableLock()
_replaced: dict[tuple[int, str], _Replaced] = {}


def _replace(instance: Any, name: str, block: object, value: Any) -> None:
    with _lock.now:
        entry = _replaced.get((id(instance), name))
        if entry is None:
            entry = _Replaced(instance, vars(instance).get(name, _ABSENT))
            _replaced[id(instance), name] = entry
        entry.values[block] = threading.get_ident(), value
        _set(instance, name, value)


def _put_back(instance: Any, name: str, block: object) -> None:
    with _lock.now:
        entry = _replaced.get((id(instance), name))
        if entry is None or block not in entry.values:
            return
        ours = [value for _, value in entry.values.values()]
        del entry.values[block]
        if not entry.values:
            del _replaced[id(instance), name]
        if any(vars(instance).get(name, _ABSENT) is value for value in ours):
            last = [value for _, value in entry.values.values()][-1:]
            _set(instance, name, last[0] if last else entry.before)


def _set(instance: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(instance).pop(name, None)
    else:
        vars(instance)[name] = value


def _end_blocks_of_other_threads() -> None:
    """In the child of a fork, the other threads do not exist."""
    own = threading.get_ident()
    for (_, name), entry in list(_replaced.items()):
        for block, (thread, _) in list(entry.values.items()):
            if thread != own:
                _put_back(entry.instance, name, block)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_blocks_of_other_threads)
