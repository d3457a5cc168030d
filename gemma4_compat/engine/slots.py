"""Replaces attributes in a way that can be undone exactly."""

from __future__ import annotations

import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import wrapt

from .patch import Place, Replacement
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
    """One of the functions around an attribute: the place that names it, and what is below it."""

    place: Replacement
    slot: Slot
    #: the attribute's value without this entry and those around it
    raw: Any = None
    #: the function that this entry puts around that
    replacement: Any = None
    #: collects a reference to each function that this entry ever put in place
    made: list[weakref.ref[Any]] = field(default_factory=list)
    order: int = 0

    @property
    def target(self) -> Target:
        return Target(self.slot.owner, self.slot.name, self.raw)

    @property
    def original(self) -> Any:
        """The function that was replaced."""
        return _unwrap(self.raw)[0]

    @property
    def before(self) -> Any:
        """The owner's own value without this entry; absent if it is inherited."""
        is_lowest = self.slot.entries[:1] == [self]
        return self.slot.before if is_lowest else self.raw

    @property
    def is_changed(self) -> bool:
        """Whether other code changed the attribute; after a reload, its module has new code."""
        owner, name, now = self.slot.owner, self.slot.name, None
        with suppress(Mismatch):
            now = resolve(self.place)
        if now is None or type(now.owner) is not type(owner):
            return _own(owner, name) is not self.slot.value
        return now.raw is not self.slot.value

    @property
    def value(self) -> Any:
        """The attribute's value with this entry and those below it."""
        return _unwrap(self.raw)[1](self.replacement)

    def wrap(self, raw: Any) -> Any:
        """The attribute's value with this entry around ``raw``."""
        function, rewrap = _unwrap(raw)
        if not isinstance(function, types.FunctionType):
            raise Mismatch(f"{self.place} is a {type(function).__name__}, not a function")
        new = self.place.factory(function)
        # isinstance() is true for a wrapt proxy, too, which torch.compile would leave out.
        if type(new) is not types.FunctionType:
            raise TypeError(f"the factory of {self.place} returned no plain function: {type(new)}")
        if new in _OURS or new is function or _is_named(new):
            raise TypeError(f"the factory of {self.place} returned a function that is not new")
        if inspect.iscoroutinefunction(new) is not inspect.iscoroutinefunction(function):
            raise Mismatch(f"{self.place} is not asynchronous as its replacement is, or is one")
        if not takes_all_calls_of(function, new):
            parameters = ", ".join(inspect.signature(function).parameters)
            raise Mismatch(f"{self.place} has other parameters than expected: {parameters}")
        owner, name = self.slot.owner, self.slot.name
        if isinstance(owner, type) and self.slot.before is _ABSENT:
            # pickle stores a reference by name: it must name this class, not the one inherited from
            new.__module__, new.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
        _OURS.add(new)
        self.made[:] = [*(each for each in self.made if each() is not None), weakref.ref(new)]
        self.raw, self.replacement = raw, new
        return rewrap(new)

    def keepers(self) -> Iterator[Any]:
        """The objects that may keep referring to the original.

        These are the staticmethod or classmethod around it, the namespace of the class that it is
        inherited from, and its own closure, if a decorator's wrapper refers to itself.
        """
        owner, is_inherited = self.slot.owner, self.before is _ABSENT
        if isinstance(owner, types.CellType):  # the function with it has ``__wrapped__``
            whole = resolve(Place(self.place.module, self.place.attribute))
            yield vars(_without_ours(whole.function))
        inherited = owner.__mro__ if isinstance(owner, type) and is_inherited else ()
        yield from (self.raw, self.slot.value, self.slot.original, self.slot.before)
        yield from getattr(self.original, "__closure__", None) or ()
        yield from (each for cls in inherited for each in gc.get_referents(vars(cls)))

    def __str__(self) -> str:
        return str(self.place)


class Slot:
    """An attribute that is replaced: its original, and the entries around it, from the inside."""

    def __init__(self, target: Target) -> None:
        self.owner, self.name, self.value = target
        self.before = _own(self.owner, self.name)
        self.entries: list[Entry] = []
        self.is_set = False
        is_inherited = self.before is _ABSENT and isinstance(self.owner, type)
        self._original = None if is_inherited else self.value

    @property
    def original(self) -> Any:
        """The attribute's value without the entries; on a class, it may be inherited."""
        if self.before is _ABSENT and isinstance(self.owner, type):
            namespaces = (vars(base) for base in self.owner.__mro__[1:])
            return next((own[self.name] for own in namespaces if self.name in own), self.value)
        return self._original

    def holds(self, target: Target) -> bool:
        """Whether this is the slot of an attribute, or of the same function in another module."""
        owner, name, raw = target
        if raw is not self.value:
            return False
        both = isinstance(owner, types.ModuleType) and isinstance(self.owner, types.ModuleType)
        return both or (owner is self.owner and name == self.name)

    def inherits(self, other: Slot) -> bool:
        """Whether its original is the value of another slot."""
        owner = self.owner
        is_below = isinstance(owner, type) and other.owner in owner.__mro__[1:]
        return self.before is _ABSENT and is_below and self.name == other.name

    @property
    def is_changed(self) -> bool:
        """Whether other code changed the attribute since it was set."""
        return any(entry.is_changed for entry in self.entries)

    def rebuild(self, first: int = 0) -> tuple[Any, Any] | None:
        """Put the entries from this one on around those before it, and set the attribute.

        Returns the values before and after, if another module may have the first one, too.

        Raises:
            Exception: A factory failed; then nothing was changed.
        """
        # Before anything here refers to the value, too.
        is_shared = isinstance(self.owner, types.ModuleType) and (
            not self.entries
            or vars(self.owner).get(self.name) is not self.value
            or sys.getrefcount(self.value) > _references_of_a_module(self.is_set)
        )
        value = self.entries[first - 1].value if first else self.original
        before = [(entry, entry.raw, entry.replacement) for entry in self.entries[first:]]
        old = self.value
        try:
            for entry in self.entries[first:]:
                value = entry.wrap(value)
            if self.is_set and _own(self.owner, self.name) is not old:
                pass  # other code changed it since
            elif self.entries or self.before is not _ABSENT:
                setattr(self.owner, self.name, value)
            elif self.is_set:
                delattr(self.owner, self.name)
        except BaseException:
            for entry, raw, replacement in before:
                entry.raw, entry.replacement = raw, replacement
            raise
        self.value, self.is_set = value, bool(self.entries)
        return (old, value) if is_shared and old is not value else None


def resolve(place: Place) -> Target:
    """Find the attribute, or the cell of a closure, that a replacement names.

    Raises:
        Mismatch: the attribute, or a part of its path, does not exist; or its function refers to
            itself, and has no such variable.
    """
    try:
        target = Target(*wrapt.resolve_path(sys.modules[place.module], place.attribute))
    except (AttributeError, KeyError) as error:
        raise Mismatch(f"{place} does not exist") from error
    return _in_closure(target, place)


def _in_closure(target: Target, place: Place) -> Target:
    """The cell of a closure that a replacement names, else the attribute."""
    variable, function = getattr(place, "variable", ""), _without_ours(target.function)
    if not variable or not getattr(function, "__closure__", None):
        return target
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    if variable in cells:
        return Target(cells[variable], "cell_contents", cells[variable].cell_contents)
    if function.__code__.co_name in cells:
        raise Mismatch(f"{place} refers to itself, and has no variable {variable}")
    return target


def _without_ours(function: Any) -> Any:
    """The function below those that replace it."""
    while isinstance(function, types.FunctionType) and function in _OURS:
        function = vars(function).get("__wrapped__")
    return function


def _own(owner: Any, name: str) -> Any:
    """The value that an owner itself has; absent if it has none."""
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    return vars(owner).get(name, _ABSENT)


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


@cache
def _references_of_a_module(is_set: bool) -> int:
    """What this Python counts for a function that nothing but its module and its slot refer to."""
    lone = types.ModuleType("lone")
    vars(lone)["function"] = lambda: None
    slot = Slot(Target(*wrapt.resolve_path(lone, "function")))
    if is_set:
        place = Replacement("lone", "function", lambda original: lambda: original())
        slot.entries.append(Entry(place, slot))
        slot.value = slot.entries[0].wrap(slot.value)
        vars(lone)["function"] = slot.value
    return sys.getrefcount(slot.value)


def former() -> Iterator[Any]:
    """What keeps the originals of replacements that exist, also of those that were removed."""
    for function in list(_OURS):
        yield from (vars(function), *(function.__closure__ or ()))


def rebind(pairs: Iterable[tuple[Any, Any]], modules: Iterable[Any]) -> None:
    """Rebind the attributes of these modules that are the first of a pair."""
    new_of = {id(old): (old, new) for old, new in pairs if old is not new}
    for module in modules if new_of else ():
        if not isinstance(module, types.ModuleType):
            continue
        if not new_of.keys().isdisjoint(map(id, tuple(vars(module).values()))):  # as most are
            for key, value in list(vars(module).items()):
                if id(value) in new_of:
                    vars(module)[key] = new_of[id(value)][1]


def _is_named(function: Any) -> bool:
    """Whether the function's name leads to it, as that of a function of a module does."""
    owner: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        owner = getattr(owner, part, None)
    return owner is function


def _unwrap(raw: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The function behind a class or module attribute, and what rebuilds the descriptor."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__, type(raw)
    if isinstance(raw, property) and raw.fget is not None:
        return raw.fget, raw.getter
    return raw, lambda function: function
