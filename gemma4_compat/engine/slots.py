"""Replaces attributes in a way that can be undone exactly."""

from __future__ import annotations

import gc
import inspect
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import wrapt

from .patch import Replacement
from .signatures import takes_all_calls_of

_ABSENT = object()
#: the functions that replace others
_OURS: weakref.WeakSet[Any] = weakref.WeakSet()


class Mismatch(AttributeError):
    """A target that a patch names does not exist, or is not as the patch expects."""


class Target(NamedTuple):
    """The owner and name of an attribute, and its raw value (on a class, perhaps inherited)."""

    owner: Any
    name: str
    raw: Any

    @property
    def function(self) -> Any:
        """The function behind the attribute."""
        return _unwrap(self.raw)[0]


@dataclass(eq=False, slots=True)
class Entry:
    """One replaced attribute: its place, its value before, and the value that we set."""

    place: Replacement
    target: Target
    before: Any
    after: Any
    #: whether a module may refer to the original under another name, as after ``from x import f``
    is_shared: bool

    @property
    def original(self) -> Any:
        """The function that was replaced."""
        return self.target.function

    @property
    def replacement(self) -> Any:
        """The function that replaced it."""
        return _unwrap(self.after)[0]

    def now(self) -> Any:
        """The attribute's present value: after a reload of its module, that of the new code."""
        try:
            return resolve(self.place).raw
        except Mismatch:
            return vars(self.target.owner).get(self.target.name, _ABSENT)

    def write(self) -> None:
        owner, name, raw = self.target
        setattr(owner, name, self.after)
        if self.is_shared:
            _rebind(raw, self.after)

    def restore(self) -> None:
        """Restore the original, except where other code has changed the attribute since."""
        owner, name, raw = self.target
        if vars(owner).get(name) is self.after:
            if self.before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, self.before)
        if isinstance(owner, types.ModuleType):
            _rebind(self.after, raw)

    def keepers(self) -> set[int]:
        """The ids of the objects that may keep referring to the original.

        These are the staticmethod or classmethod around it, the namespace of the class that it is
        inherited from, and its own closure, if a decorator's wrapper refers to itself.
        """
        owner, _, raw = self.target
        closure = getattr(self.original, "__closure__", None) or ()
        inherited = owner.__mro__ if isinstance(owner, type) and self.before is _ABSENT else ()
        namespaces = (each for cls in inherited for each in gc.get_referents(vars(cls)))
        return {id(raw), *map(id, closure), *map(id, namespaces)}

    def __str__(self) -> str:
        return str(self.place)


def resolve(replacement: Replacement) -> Target:
    """Find the attribute that a replacement names.

    Raises:
        Mismatch: the attribute, or a part of its path, does not exist.
    """
    try:
        return Target(*wrapt.resolve_path(sys.modules[replacement.module], replacement.attribute))
    except (AttributeError, KeyError) as error:
        raise Mismatch(f"{replacement} does not exist") from error


def look_up(name: str) -> None:
    """Check that a name such as ``library.module.Class.attribute`` exists, if it is imported.

    An attribute of objects follows ``Class()``, or the function that sets it.

    Raises:
        Mismatch: the name, or a part of it, does not exist.
    """
    parts, known = name.split("."), 0
    owner: Any = None
    while known < len(parts) and (module := sys.modules.get(".".join(parts[: known + 1]))):
        owner, known = module, known + 1
    for part in parts[known:] if owner else ():
        if isinstance(owner, types.ModuleType) and part not in vars(owner):
            is_package = hasattr(owner, "__path__") and find_spec(f"{owner.__name__}.{part}")
            if is_package or getattr(owner.__spec__, "_initializing", False):
                return  # it is not imported yet
        if isinstance(owner, types.FunctionType) and _sets(owner, part):
            return
        try:
            owner = getattr(owner, part.removesuffix("()"))
            owner = owner() if part.endswith("()") else owner
        except Exception as error:
            raise Mismatch(f"{name} does not exist") from error


def _sets(function: Any, name: str) -> bool:
    return name in inspect.unwrap(function).__code__.co_names


def prepare(replacement: Replacement) -> Entry:
    """Build the replacement.  Nothing is written yet.

    Raises:
        Mismatch: the target does not exist, is no function, or accepts calls that the replacement
            would refuse.
        TypeError: the factory did not return a plain function.
    """
    target = resolve(replacement)
    is_shared = _is_shared(target)
    function, rewrap = _unwrap(target.raw)
    if not isinstance(function, types.FunctionType):
        raise Mismatch(f"{replacement} is a {type(function).__name__}, not a function")
    new = replacement.factory(function)
    # isinstance() is true for a wrapt proxy, too, which torch.compile would leave out.
    if type(new) is not types.FunctionType:
        raise TypeError(f"the factory of {replacement} returned no plain function: {type(new)}")
    if not takes_all_calls_of(function, new):
        parameters = ", ".join(inspect.signature(function).parameters)
        raise Mismatch(f"{replacement} has other parameters than expected: {parameters}")
    before = vars(target.owner).get(target.name, _ABSENT)
    if before is _ABSENT and isinstance(target.owner, type):
        # pickle stores a reference by name: it must name this class, not the one inherited from.
        new.__module__ = target.owner.__module__
        new.__qualname__ = f"{target.owner.__qualname__}.{target.name}"
    _OURS.add(new)
    return Entry(replacement, target, before, rewrap(new), is_shared)


def _is_shared(target: Target) -> bool:
    """Whether more than its module refers to a function.  To look at all modules takes 20 ms."""
    if not isinstance(target.owner, types.ModuleType):
        return False
    by_entry = target.raw in _OURS
    return _references(target) > _references_of_a_module() + by_entry


def _references(target: Target) -> int:
    return sys.getrefcount(target.raw)


@cache
def _references_of_a_module() -> int:
    """What this Python counts for a function that nothing but its module refers to."""
    lone = types.ModuleType("lone")
    vars(lone)["function"] = lambda: None
    return _references(Target(*wrapt.resolve_path(lone, "function")))


def _rebind(old: Any, new: Any) -> None:
    """Rebind every module attribute that is ``old`` itself."""
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        values = tuple(vars(module).values())
        if any(map(operator.is_, values, itertools.repeat(old))):  # as most do not
            for key, value in list(vars(module).items()):
                if value is old:
                    vars(module)[key] = new


def _unwrap(raw: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The function behind a class or module attribute, and what rebuilds the descriptor."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__, type(raw)
    if isinstance(raw, property) and raw.fget is not None:
        return raw.fget, raw.getter
    return raw, lambda function: function
