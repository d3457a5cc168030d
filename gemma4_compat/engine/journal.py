"""Replacing attributes so that it can be taken back exactly."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import wrapt

from .patch import Replacement

_ABSENT = object()
_MARK = "__patch_mark__"
#: tells our own replacements from those of a copy of this package that was thrown away
_COPY = object()


class _Mark:
    """Left on every replacement function: who installed it, and over what."""

    def __init__(self, function: types.FunctionType, before: Any) -> None:
        self.copy = _COPY
        self.function = function
        self.before = before


class Missing(AttributeError):
    """A target that a patch names is not there."""


@dataclass(frozen=True)
class Entry:
    """One changed slot: whose it is, what was there, what we put there.

    ``captured`` marks a name that another module had taken by ``from x import f``.
    """

    owner: Any
    name: str
    before: Any
    after: Any
    captured: bool = False

    @property
    def slot(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def in_place(self) -> bool:
        """Whether our object is still the one in the slot."""
        return vars(self.owner).get(self.name, _ABSENT) is self.after

    def write(self) -> None:
        setattr(self.owner, self.name, self.after)

    def restore(self) -> bool:
        """Put back what was there; ``False`` (and no change) if somebody changed it since."""
        if not self.in_place():
            return False
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)
        return True

    def __str__(self) -> str:
        owner = self.owner.__name__
        if isinstance(self.owner, type):
            owner = f"{self.owner.__module__}.{self.owner.__qualname__}"
        return f"{owner}.{self.name}"


def prepare(replacement: Replacement) -> list[Entry]:
    """The slots that a replacement changes: its target, and every module that captured it.

    Nothing is written yet.

    Raises:
        Missing: the target, or a part of its path, does not exist or is no function.
    """
    module = sys.modules[replacement.module]
    try:
        owner, name, raw = wrapt.resolve_path(module, replacement.attribute)
    except AttributeError as error:
        raise Missing(f"{replacement} does not exist") from error
    raw = _unmarked(raw)
    function, rewrap = _unwrap(raw)
    if not isinstance(function, types.FunctionType):
        raise Missing(f"{replacement} is a {type(function).__name__}, not a function")
    new = replacement.factory(function)
    setattr(new, _MARK, _Mark(new, raw))
    after = rewrap(new)
    entries = [Entry(owner, name, _before(owner, name), after)]
    if isinstance(owner, types.ModuleType):
        captured = _captures(function, besides=owner, name=name)
        entries += [Entry(other, key, function, after, captured=True) for other, key in captured]
    return entries


def reloaded(entry: Entry, replacements: list[Replacement]) -> bool:
    """Whether the module of an entry was reloaded: its target is the original anew."""
    before, _ = _unwrap(entry.before)
    for replacement in replacements:
        try:
            _, _, raw = wrapt.resolve_path(
                sys.modules[replacement.module], replacement.attribute
            )
        except (AttributeError, KeyError):
            continue
        now, _ = _unwrap(raw)
        if now is not before and getattr(now, "__code__", None) == before.__code__:
            return True
    return False


def unreachable(entries: list[Entry]) -> int:
    """How many live objects still hold the function that the first entry replaced.

    Bound methods, partials, closures, containers and subclasses that took it before the patch
    keep calling the original; nothing can be done about them except to say so.
    """
    function, _ = _unwrap(entries[0].before)
    new, _ = _unwrap(entries[0].after)
    if not isinstance(function, types.FunctionType):
        return 0
    ours = {id(cell) for cell in new.__closure__ or ()}
    ours |= {id(vars(new)), id(vars(getattr(new, _MARK)))}
    ours |= {id(vars(entry)) for entry in entries}
    holders = (types.MethodType, functools.partial, types.CellType, dict, list, tuple)
    return sum(
        isinstance(holder, holders) and id(holder) not in ours
        for holder in gc.get_referrers(function)
    )


def _before(owner: Any, name: str) -> Any:
    before = vars(owner).get(name, _ABSENT)
    return before if before is _ABSENT else _unmarked(before)


def _unmarked(raw: Any) -> Any:
    """What was there before a copy of this engine that was dropped without an uninstall."""
    function, _ = _unwrap(raw)
    mark = getattr(function, _MARK, None)
    # functools.wraps copies the mark to wrappers that others put around our function.
    if mark is None or mark.function is not function or mark.copy is _COPY:
        return raw
    return mark.before


def _unwrap(raw: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The function behind a class or module attribute, and how to put it back."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__, type(raw)
    return raw, lambda function: function


def _captures(
    function: Callable[..., Any], besides: types.ModuleType, name: str
) -> Iterator[tuple[types.ModuleType, str]]:
    """Every module attribute that is ``function`` itself (``from x import f``)."""
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if value is function and (module is not besides or key != name):
                yield module, key
