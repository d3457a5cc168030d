"""The replacements that each patch has in place, and the order in which they can be removed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from . import gate
from .patch import Part, Patch, Replacement
from .references import holders
from .slots import Entry, prepare, resolve


@dataclass(eq=False)
class Layer:
    """The replacements that one patch, or one part of it, has in place."""

    patch: Patch
    unit: Part | Patch
    #: the layers of all its parts
    siblings: Sequence[Layer] = ()
    #: whether it put the replacements of the whole patch in place, as the first part
    is_first: bool = False
    entries: list[Entry] = field(default_factory=list)
    #: every replacement that was ever in place and is still referenced
    made: list[weakref.ref[Any]] = field(default_factory=list)

    @property
    def replacements(self) -> list[Replacement]:
        """The replacements that exist on the installed versions, those of the whole patch too."""
        own = () if self.unit is self.patch else self.unit.replacements
        each = (*own, *self.patch.replacements)
        return [r for r in each if r.when is None or gate.holds(r.when)]

    @property
    def names(self) -> list[str]:
        """The names that its replacements read, without those of other parts' modules."""
        others = {r.module for part in self.patch.parts for r in part.replacements}
        others -= {r.module for r in self.unit.replacements}
        theirs = tuple(f"{module}." for module in others)
        return [name for name in self.patch.names if not name.startswith(theirs)]

    @property
    def functions(self) -> set[int]:
        """The ids of the functions that it replaced, and of their replacements."""
        return {id(f) for entry in self.entries for f in (entry.original, entry.replacement)}

    def touches(self, other: Layer) -> bool:
        """Whether both replace one attribute, or one replaces what the other inherits."""
        return not self.functions.isdisjoint(other.functions)

    def put(self) -> None:
        """Put all replacements in place, or none."""
        written: list[Entry] = []
        is_first = not any(layer.is_first for layer in self.siblings)
        try:
            # One after the other, so that two replacements of one attribute stack.
            for replacement in self.replacements:
                if replacement in self.patch.replacements and not is_first:
                    continue
                written.append(entry := prepare(replacement))
                entry.write()
        except BaseException:
            _restore(written)
            raise
        self.entries, self.is_first = written, is_first
        self.made += [weakref.ref(entry.replacement) for entry in written]

    def take_off(self) -> None:
        """Restore the originals."""
        _restore(self.entries)
        self.entries, self.is_first = [], False
        if self.patch.release is not None:
            self.patch.release()

    def calls(self, other: Layer) -> bool:
        """Whether it replaced a replacement of the other layer, perhaps an inherited one."""
        theirs = {id(entry.replacement) for entry in other.entries}
        return any(id(entry.original) in theirs for entry in self.entries)

    def needs(self, other: Layer) -> bool:
        """Whether it must be removed before the other layer."""
        if self.patch is other.patch:
            return other.is_first and self is not other and bool(self.entries)
        required = bool(self.entries) and other.patch.name in self.patch.requires
        return required or self.calls(other)

    def references(self) -> int:
        """How many references to its replacements, present or former, exist."""
        alive = [function for function in (each() for each in self.made) if function is not None]
        self.made = [weakref.ref(function) for function in alive]
        return len(holders(alive))


_Relation = Callable[[Layer, Layer], bool]


class Stack:
    """The layers of all patches.

    Layers that replace the same attribute are stacked in the order of ``layers``, the last one on
    top.  If other code changes such an attribute, the layers below its change stay until it is
    undone, and so do the layers that they need.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers = list(layers)

    def make_room(self, layer: Layer) -> list[Layer]:
        """Remove the layers that belong above a layer that is about to be put; returns them."""
        functions = set(map(id, originals(layer.replacements)))
        higher = self.layers[self.layers.index(layer) + 1 :]
        touching = [each for each in higher if not functions.isdisjoint(each.functions)]
        stack = self._with(touching, lambda a, b: a in higher and a.touches(b))
        return self._peel(stack)

    def take_off(self, layers: Iterable[Layer]) -> list[Layer]:
        """Remove those of the layers that can be removed, and the layers above or needing them.

        Returns all removed layers.
        """
        stuck = self._stuck()
        free = [layer for layer in layers if layer.entries and layer not in stuck]
        order = self.layers.index

        def follows(layer: Layer, other: Layer) -> bool:
            # If other code had changed the attribute meanwhile, a lower layer can be on top, too.
            return layer.needs(other) or (order(layer) > order(other) and layer.touches(other))

        return self._peel([layer for layer in self._with(free, follows) if layer not in stuck])

    def changed(self, layer: Layer) -> list[Entry]:
        """The layer's entries whose attributes other code changed afterwards."""
        entries = [entry for each in self.layers for entry in each.entries]
        return [entry for entry in layer.entries if not _is_under(entry, entries)]

    def obstacle(self, layer: Layer) -> str:
        """Why a layer cannot be removed; "" if it can."""
        if changed := ", ".join(map(str, self.changed(layer))):
            return f"other code changed {changed} afterwards"
        stay = [each.patch.name for each in self._stuck() if each.needs(layer)]
        return f"{', '.join(stay)} needs it and cannot be uninstalled" if stay else ""

    def _stuck(self) -> list[Layer]:
        """The layers that cannot be removed."""
        stuck = [layer for layer in self.layers if self.changed(layer)]
        for layer in stuck:  # the list grows meanwhile
            stuck += [each for each in self.layers if each not in stuck and layer.needs(each)]
        return stuck

    def _with(self, layers: Iterable[Layer], follows: _Relation) -> list[Layer]:
        """``layers`` and all layers that follow from them, the lowest first."""
        closure: list[Layer] = []
        more = list(layers)
        while more:
            closure += more
            rest = (layer for layer in self.layers if layer not in closure)
            more = [layer for layer in rest if any(follows(layer, each) for each in closure)]
        return sorted(closure, key=self.layers.index)

    def _peel(self, layers: Sequence[Layer]) -> list[Layer]:
        """Remove one layer after the other, always one that is on top; returns those removed.

        Of several, a layer that the others do not need comes first, then the highest one.
        """
        off: list[Layer] = []
        while free := [layer for layer in reversed(layers) if self._is_on_top(layer)]:
            rest = [layer for layer in layers if layer.entries]
            unneeded = (f for f in free if not any(r.needs(f) for r in rest if r is not f))
            top = next(unneeded, free[0])
            top.take_off()
            off.append(top)
        return off

    def _is_on_top(self, layer: Layer) -> bool:
        ours = {id(entry.after) for entry in layer.entries}
        if not ours or any(id(entry.now()) not in ours for entry in layer.entries):
            return False
        return not any(other.calls(layer) for other in self.layers if other is not layer)


def originals(replacements: Iterable[Replacement]) -> list[Any]:
    """The functions that the replacements will replace, if they exist."""
    functions = []
    for replacement in replacements:
        with suppress(Exception):  # the error occurs again, and is logged, when the layer is put
            functions.append(resolve(replacement).function)
    return functions


def _is_under(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Whether an entry is in place, or only these entries are stacked above it."""
    now = entry.now()
    top = next((each for each in entries if each.after is now), None)
    while top is not None and top is not entry:
        top = next((each for each in entries if each.replacement is top.original), None)
    return top is entry


def _restore(entries: Sequence[Entry]) -> None:
    for entry in reversed(entries):
        entry.restore()
