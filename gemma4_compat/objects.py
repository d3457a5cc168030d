"""Attributes on objects of users and libraries, and locks: copies, pickles and forks still work.

Code that only reads an object gets a ``variant`` or a ``View`` of it.  Code that stores or changes
the object needs the object itself: ``shadowed`` replaces its attributes for the length of a
``with`` block, and other threads see the new ones during the block.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_ABSENT = object()
_locks: weakref.WeakSet[ForkableLock] = weakref.WeakSet()


class ForkableLock:
    """Has an ``RLock`` as its attribute ``now``; use that in a ``with`` statement.

    A fork copies a lock that another thread holds, but not that thread, so nobody gives it back.
    The child of a fork gets a new one.
    """

    def __init__(self) -> None:
        self.now: Any = threading.RLock()
        _locks.add(self)


def _renew() -> None:
    for lock in list(_locks):
        if not lock.now._is_owned():
            lock.now = threading.RLock()


class NotCopied:
    """Becomes ``None`` in a deep copy and in a pickle, so that neither needs this package."""

    def __reduce__(self) -> Any:
        return type(None), ()


_attaching = ForkableLock()


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


class View:
    """Has these attributes; reads every other attribute from ``module``, and sets it there.

    Pass it where a forward expects the module, also as ``self``.  The module itself does not
    change, so other threads can run its forward at the same time.
    """

    def __init__(self, module: Any, **attributes: Any) -> None:
        own = vars(self)
        own["_module"] = module
        for name, value in attributes.items():  # torch.compile knows no update before torch 2.12
            own[name] = value

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # torch.compile makes the object before its attributes
            raise AttributeError(name)
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)


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
    block = _Block()
    try:
        for name, value in attributes.items():
            _replace(instance, name, block, value)
        yield
    finally:
        try:
            _put_back(instance, attributes, block)
        except BaseException:  # an interrupt in the middle of it
            _put_back(instance, attributes, block)
            raise


def hidden(instance: Any, *names: str) -> Any:
    """A block without these attributes in ``vars(instance)``, so that those of the class apply."""
    return shadowed(instance, **{name: _ABSENT for name in names if name in vars(instance)})


class _Block:
    """A ``with`` block of this thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class _Replaced(NamedTuple):
    """An attribute of one instance that blocks have replaced."""

    instance: Any  # which keeps its id in use
    before: Any
    values: dict[_Block, Any]


_lock = ForkableLock()
_replaced: dict[tuple[int, str], _Replaced] = {}


def _replace(instance: Any, name: str, block: _Block, value: Any) -> None:
    with _lock.now:
        new = _Replaced(instance, vars(instance).get(name, _ABSENT), {block: value})
        _replaced.setdefault((id(instance), name), new).values[block] = value
        _set(instance, name, value)


def _put_back(instance: Any, names: Iterable[str], block: _Block) -> None:
    """End a block for these attributes; may be called again if it was interrupted."""
    for name in names:
        with _lock.now:
            entry = _replaced.get((id(instance), name))
            if entry is None or block not in entry.values:
                continue
            others = [value for other, value in entry.values.items() if other is not block]
            found = vars(instance).get(name, _ABSENT)
            if any(found is value for value in entry.values.values()):  # else other code has set it
                _set(instance, name, [entry.before, *others][-1])
            if others:
                del entry.values[block]
            else:
                del _replaced[id(instance), name]


def _set(instance: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(instance).pop(name, None)
    else:
        vars(instance)[name] = value


def _end_blocks_of_other_threads() -> None:
    """In the child of a fork, the other threads do not exist."""
    own = threading.get_ident()
    for (_, name), entry in list(_replaced.items()):
        for block in list(entry.values):
            if block.thread != own:
                _put_back(entry.instance, [name], block)


if hasattr(os, "register_at_fork"):  # a fork may have copied locks that other threads hold
    os.register_at_fork(after_in_child=_renew)
    os.register_at_fork(after_in_child=_end_blocks_of_other_threads)
