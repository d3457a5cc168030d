"""Compares a model with a snapshot in a millisecond or two, as is needed between two tokens.

A ``Snapshot`` keeps nothing alive, and compares values.  A ``Held`` keeps what it compares, for the
time of one call: what is held is not freed, so no other object gets its identity.  A new object of
equal value counts as a change; the snapshot decides then.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from ...model.hooks import offload_hook
from ..kernels.watch import Use
from .snapshot import CONTAINERS, LEFT_OUT, NUMBERS, Snapshot, tensors_of

_STATES = "QuantState", "MatmulLtState"  # of bitsandbytes' weights and layers
_HAVE_TENSORS = "_parameters", "_buffers"


class Held:
    """All that a snapshot compares, as it is now."""

    def __init__(self, snapshot: Snapshot) -> None:
        import torch

        self._objects = snapshot.objects()
        self._hooked = [each for each in self._objects if offload_hook(each) is not None]
        found = _containers(map(vars, self._objects))
        self._empty = [each for each in found if not each]
        self._dicts = [each for each in found if isinstance(each, dict) and each]
        self._lists = [each for each in found if not isinstance(each, dict) and each]
        self._names = _names_by_owner(snapshot.code)
        owners = {owner: entries for (owner, _), (entries, *_) in snapshot.code.items()}
        self._classes = [each for each in owners.values() if not isinstance(each, dict)]
        self._functions = [function for function, _, _ in snapshot.bodies]
        self._values = self._now()
        each_once = {id(each): each for each in self._values if isinstance(each, torch.Tensor)}
        self._tensors = [*each_once.values()]
        own = (tensors_of(each) for each in self._objects if hasattr(each, "_parameters"))
        self._own = [*chain.from_iterable(own)]
        small = (each for each in self._tensors if each.numel() <= NUMBERS)
        self._numbers = [each for each in small if each.device.type == "cpu"]
        # The others are equal only to themselves, or are numbers and names.
        may_be_equal = each_once.keys() | set(map(id, found))
        numbers = [n for n, each in enumerate(self._values) if id(each) in may_be_equal]
        self._those = itemgetter(0, 0, *numbers)
        self._places = self._places_now()

    def is_same(self) -> bool:
        """Whether nothing has changed since."""
        try:
            now = self._now()
            return (
                now == self._values
                and all(map(is_, self._those(now), self._those(self._values)))
                and not any(self._empty)
                and self._places_now() == self._places
            )
        except (KeyError, RuntimeError):  # a name is gone, or a tensor is compared with another
            return False

    def _now(self) -> list[Any]:
        dicts = [*map(vars, self._objects), *self._dicts]
        return [
            *map(type, self._objects),
            *chain.from_iterable(map(dict.values, dicts)),
            *map(next, map(reversed, dicts)),  # a name that changes becomes the last one
            *chain.from_iterable(self._lists),
            *chain.from_iterable(get(owner) for owner, get in self._names),
            *map(len, self._classes),
            *map(attrgetter("__code__"), self._functions),
            *map(attrgetter("__defaults__"), self._functions),
            *chain.from_iterable(map(tensors_of, self._hooked)),
        ]

    def _places_now(self) -> list[Any]:
        import torch

        with torch._C.DisableTorchFunctionSubclass():
            return [
                *map(torch.Tensor.data_ptr, self._tensors),
                *map(torch.Tensor.stride, self._own),
                *map(torch.Tensor.tolist, self._numbers),
            ]


def _containers(tables: Iterable[dict[str, Any]]) -> list[Any]:
    """The containers in these and in each other, and the attributes of quantized weights."""
    found: dict[int, Any] = {}
    left_out = LEFT_OUT.difference(_HAVE_TENSORS)
    queue = [v for own in tables for name, v in own.items() if name not in left_out]
    for value in queue:  # the list grows meanwhile
        if isinstance(value, partial):
            queue.append(value.keywords)
        elif type(value).__name__ in _STATES or hasattr(type(value), "data_ptr"):
            queue.append(vars(value))
        elif isinstance(value, CONTAINERS) and id(value) not in found:
            found[id(value)] = value
            queue += value.values() if isinstance(value, dict) else value
    return [*found.values()]


def _names_by_owner(code: dict[tuple[int, str], Use]) -> list[tuple[Any, Any]]:
    """Namespaces, and what gets from each the values that are compared."""
    names: dict[int, tuple[Any, list[str]]] = {}
    for (owner, name), (entries, *_) in code.items():
        of_owner = names.setdefault(owner, (entries, []))[1]
        of_owner += [name] if name in entries else []  # else it has that of a base class
    return [(own, itemgetter(*each, each[0])) for own, each in names.values() if each]
