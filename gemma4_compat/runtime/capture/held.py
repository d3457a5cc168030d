"""Compares a model with a snapshot in a millisecond or two, as is needed between two tokens.

A ``Snapshot`` keeps nothing alive.  A ``Held`` keeps what it compares, for the time of one call, so
that one comparison of two lists, which runs in C, serves many modules.  What is held is not freed,
so no other object gets its identity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import attrgetter, eq, is_, itemgetter
from typing import Any

from ..kernels.watch import Use
from .snapshot import CONTAINERS, LEFT_OUT, NUMBERS, Snapshot

_TENSORS = "_parameters", "_buffers"
_LEFT_OUT = LEFT_OUT.difference(_TENSORS)


class Held:
    """All that a snapshot compares, as it is now."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._objects = snapshot.objects()
        self._tables: list[dict[str, Any]] = [vars(each) for each in self._objects]
        self._rest = [own for own in snapshot.modules if _needs_more(vars(own.module()))]
        names: defaultdict[Any, list[Any]] = defaultdict(list)
        for own in self._tables:
            names[tuple(name for name in own if name not in _LEFT_OUT)].append(own)
        self._groups = [(itemgetter(each[0], *each), owns) for each, owns in names.items()]
        self._settings = [[*map(_copied, map(get, owns))] for get, owns in self._groups]
        self._owners = [own for own in self._tables if any(map(own.get, _TENSORS))]
        self._states = [*_states(self._own_tensors())]
        self._code = _by_owner(snapshot.code)
        pairs = ((own, name) for (_, name), (own, *_) in snapshot.code.items())
        self._inherited = [(own, name) for own, name in pairs if name not in own]
        self._classes = [own for own, _, _ in snapshot.classes]
        values = (value for own in self._tables for value in own.values())
        self._keywords = [each.keywords for each in values if isinstance(each, partial)]
        self._functions = [function for function, _, _ in snapshot.bodies]
        self._equal, self._same = self._equal_now(), self._same_now()
        self._tensors = [each for each in self._same if hasattr(type(each), "data_ptr")]
        self._weights = [each for each in self._own_tensors() if each is not None]
        small = (each for each in self._tensors if each.numel() <= NUMBERS)
        self._numbers = [each for each in small if each.device.type == "cpu"]
        self._places = self._places_now()

    def is_same(self) -> bool:
        """Whether nothing has changed since."""
        try:
            groups = zip(self._groups, self._settings, strict=True)
            if not all(all(map(eq, map(get, owns), settings)) for (get, owns), settings in groups):
                return False
            same = self._same_now()
            return (
                self._equal_now() == self._equal
                and len(same) == len(self._same)
                and all(map(is_, same, self._same))
                and self._places_now() == self._places
                and not any(own.change() for own in self._rest)
            )
        except (KeyError, RuntimeError):  # a name is gone, or a tensor is compared with another
            return False

    def _own_tensors(self) -> Iterator[Any]:
        entries = (map(itemgetter(name), self._owners) for name in _TENSORS)
        return chain.from_iterable(map(dict.values, chain.from_iterable(entries)))

    def _equal_now(self) -> list[Any]:
        """What is equal to itself alone, and numbers."""
        return [
            *map(type, self._objects),
            *map(len, self._tables),
            *map(len, self._classes),
            *chain.from_iterable(get(owner) for owner, get in self._code),
            *(name in own for own, name in self._inherited),
            *map(attrgetter("__code__"), self._functions),
            *map(attrgetter("__defaults__"), self._functions),
            *chain.from_iterable(map(dict.values, self._keywords)),
        ]

    def _same_now(self) -> list[Any]:
        """Tensors, which may be equal to others, and the attributes of quantized weights."""
        return [*self._own_tensors(), *chain.from_iterable(map(dict.values, self._states))]

    def _places_now(self) -> list[Any]:
        import torch

        with torch._C.DisableTorchFunctionSubclass():
            return [
                *map(torch.Tensor.data_ptr, self._tensors),
                *chain.from_iterable(map(torch.Tensor.stride, self._weights)),
                *map(attrgetter("shape", "dtype"), self._weights),
                *map(torch.Tensor.tolist, self._numbers),
            ]


def _needs_more(own: Any) -> bool:
    """Whether a module's weights are offloaded, or it has tensors in other attributes."""
    others = [value for name, value in own.items() if name not in LEFT_OUT]
    for value in others:  # the list grows meanwhile
        if isinstance(value, CONTAINERS):
            others += value.values() if isinstance(value, dict) else value
    return "_hf_hook" in own or any(hasattr(type(value), "data_ptr") for value in others)


def _copied(value: Any) -> Any:
    """The same value, with copies of the containers in it."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_copied, value))
    return frozenset(value) if isinstance(value, CONTAINERS) else value


def _states(tensors: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """The attributes of quantized weights, and of their quant states."""
    for tensor in tensors:
        state: Any = tensor
        while vars(state) if hasattr(state, "__dict__") else None:
            yield vars(state)
            state = vars(state).get("quant_state") or vars(state).get("state2")


def _by_owner(code: dict[tuple[int, str], Use]) -> list[tuple[Any, Any]]:
    """Namespaces, and what gets from each the values that are compared."""
    names: dict[int, tuple[Any, list[str]]] = {}
    for (owner, name), (entries, *_) in code.items():
        of_owner = names.setdefault(owner, (entries, []))[1]
        of_owner += [name] if name in entries else []
    return [(own, itemgetter(each[0], *each)) for own, each in names.values() if each]
