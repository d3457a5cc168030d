"""Replacing attributes so that it can be taken back exactly."""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import wrapt

from .patch import Replacement

_ABSENT = object()
_ARGS, _KWARGS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Missing(AttributeError):
    """A target that a patch names is not there, or not as the patch takes it to be."""


class Target(NamedTuple):
    """Where a replacement goes, and what is found there now (on a class, perhaps inherited)."""

    owner: Any
    name: str
    raw: Any

    @property
    def function(self) -> Any:
        """The function behind the attribute."""
        return _unwrap(self.raw)[0]


@dataclass(eq=False, slots=True)
class Entry:
    """One changed slot: whose it is, what was there, what we put there."""

    target: Target
    before: Any
    after: Any

    @property
    def original(self) -> Any:
        """The function that was replaced."""
        return self.target.function

    @property
    def replacement(self) -> Any:
        """The function that replaced it."""
        return _unwrap(self.after)[0]

    def now(self) -> Any:
        """What is in the slot."""
        return vars(self.target.owner).get(self.target.name, _ABSENT)

    def in_place(self) -> bool:
        """Whether our object is still the one in the slot."""
        return self.now() is self.after

    def write(self) -> None:
        owner, name, raw = self.target
        setattr(owner, name, self.after)
        if isinstance(owner, types.ModuleType):
            _rebind(raw, self.after)

    def restore(self) -> None:
        """Put back what was there, wherever nobody changed it since."""
        owner, name, raw = self.target
        if self.in_place():
            if self.before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, self.before)
        if isinstance(owner, types.ModuleType):
            _rebind(self.after, raw)

    def keepers(self) -> set[int]:
        """The identities of what goes on to hold the original by right.

        That is the staticmethod or classmethod around it, the class it is inherited from, and its
        own closure, where a decorator's wrapper knows itself by name.
        """
        owner, _, raw = self.target
        closure = getattr(self.original, "__closure__", None) or ()
        inherited = owner.__mro__ if isinstance(owner, type) and self.before is _ABSENT else ()
        namespaces = (each for cls in inherited for each in gc.get_referents(vars(cls)))
        return {id(raw), *map(id, closure), *map(id, namespaces)}

    def __str__(self) -> str:
        owner = self.target.owner
        name = owner.__name__
        if isinstance(owner, type):
            name = f"{owner.__module__}.{owner.__qualname__}"
        return f"{name}.{self.target.name}"


def resolve(replacement: Replacement) -> Target:
    """Find what a replacement names.

    Raises:
        Missing: the target, or a part of its path, does not exist.
    """
    try:
        return Target(*wrapt.resolve_path(sys.modules[replacement.module], replacement.attribute))
    except (AttributeError, KeyError) as error:
        raise Missing(f"{replacement} does not exist") from error


def prepare(replacement: Replacement) -> Entry:
    """The change that a replacement makes.  Nothing is written yet.

    Raises:
        Missing: the target does not exist, is no function, or takes calls that the replacement
            would not.
    """
    target = resolve(replacement)
    function, rewrap = _unwrap(target.raw)
    if not isinstance(function, types.FunctionType):
        raise Missing(f"{replacement} is a {type(function).__name__}, not a function")
    new = replacement.factory(function)
    # A wrapt proxy claims to be a function; torch.compile would leave it out.
    if type(new) is not types.FunctionType:
        raise TypeError(f"the factory of {replacement} made no plain function: {type(new)}")
    if not _takes_all_calls_of(function, new):
        takes = ", ".join(inspect.signature(function).parameters)
        raise Missing(f"{replacement} takes other parameters than expected: {takes}")
    before = vars(target.owner).get(target.name, _ABSENT)
    if before is _ABSENT and isinstance(target.owner, type):
        # Pickled by reference, it must be found under this class, not under the one it is from.
        new.__module__ = target.owner.__module__
        new.__qualname__ = f"{target.owner.__qualname__}.{target.name}"
    return Entry(target, before, rewrap(new))


def reloaded(replacement: Replacement, entries: Iterable[Entry]) -> bool:
    """Whether the module was executed again since: the same code, but not the function we know.

    What others put over or in place of our function is not that.
    """
    try:
        now = inspect.unwrap(resolve(replacement).function)
        known = [inspect.unwrap(entry.original) for entry in entries]
    except (Missing, ValueError):
        return False
    code = getattr(now, "__code__", None)
    return all(now is not each for each in known) and any(code == each.__code__ for each in known)


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


def count_held(holders: Iterable[Any], entries: Iterable[Entry]) -> int:
    """How many references to the originals are left in what held them before the change."""
    rightful = {id(entry.original): entry.keepers() for entry in entries}
    return sum(
        id(holder) not in rightful[id(held)]
        for holder in holders
        for held in gc.get_referents(holder)
        if id(held) in rightful
    )


def _takes_all_calls_of(original: Any, new: Any) -> bool:
    """Whether every call of the original suits ``new``, with each argument under the same name.

    What somebody's wrapper takes as ``*args`` is not known.
    """
    bare = types.FunctionType(new.__code__, {}, None, new.__defaults__, new.__closure__)
    bare.__kwdefaults__ = new.__kwdefaults__
    ours = inspect.signature(bare)  # not what ``functools.wraps`` says
    every = inspect.signature(original).parameters.values()
    named = [p for p in every if p.kind not in (_ARGS, _KWARGS)]
    names = [p.name for p in named]
    bind = ours.bind if _ARGS not in [p.kind for p in every] else ours.bind_partial
    required = [p for p in named if p.default is p.empty]
    for parameters, by_position in ((every, (0, 1, _ARGS)), (every, (0,)), (required, (0,))):
        # Each argument is the name of its parameter.
        args = [p.name for p in parameters if p.kind in by_position]
        kwargs = {p.name: p.name for p in parameters if p.name not in args and p.kind is not _ARGS}
        try:
            bound = bind(*args, **kwargs).arguments
        except TypeError:
            return False
        if any(value in names and value != name for name, value in bound.items()):
            return False
    return True


def _rebind(old: Any, new: Any) -> None:
    """Rebind every module attribute that is ``old`` itself: ``from x import f`` captured it."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if value is old:
                    vars(module)[key] = new


def _unwrap(raw: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The function behind a class or module attribute, and how to put it back."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__, type(raw)
    if isinstance(raw, property) and raw.fget is not None:
        return raw.fget, raw.getter
    return raw, lambda function: function
