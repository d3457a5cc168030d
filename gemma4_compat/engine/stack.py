"""What each patch has in place, and in which order it comes off."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from . import gate
from .patch import Patch, Replacement
from .references import holders
from .slots import Entry, prepare, reloaded, resolve


@dataclass(eq=False)
class Layer:
    """What one patch has in place."""

    patch: Patch
    entries: list[Entry] = field(default_factory=list)
    #: what was in place in a module that was reloaded since: its old classes live on in objects
    former: list[Entry] = field(default_factory=list)
    #: every replacement that was ever in place, as long as somebody holds it
    made: list[weakref.ref[Any]] = field(default_factory=list)

    @property
    def replacements(self) -> list[Replacement]:
        """The replacements that exist on the installed versions."""
        return [r for r in self.patch.replacements if r.when is None or gate.holds(r.when)]

    @property
    def functions(self) -> set[int]:
        """The identities of the functions that it replaced and put in place."""
        return {id(f) for entry in self.entries for f in (entry.original, entry.replacement)}

    def touches(self, other: Layer) -> bool:
        """Whether both are stacked on one slot, or inherit what is in it."""
        return not self.functions.isdisjoint(other.functions)

    def put(self) -> None:
        """Put all replacements in place, or none."""
        written: list[Entry] = []
        try:
            # One after the other, so that two replacements of one slot stack.
            for replacement in self.replacements:
                written.append(entry := prepare(replacement))
                entry.write()
        except BaseException:
            _restore(written)
            raise
        self.entries = written
        self.made += [weakref.ref(entry.replacement) for entry in written]

    def take_off(self) -> None:
        """Put back what was there."""
        _restore(self.entries)
        self.entries = []
        if self.patch.release is not None:
            self.patch.release()

    def take_off_former(self) -> None:
        """The same for what was in place in modules that were reloaded since."""
        _restore(self.former)

    def calls(self, other: Layer) -> bool:
        """Whether it replaced a replacement of the other, perhaps an inherited one."""
        theirs = {id(entry.replacement) for entry in other.entries}
        return any(id(entry.original) in theirs for entry in self.entries)

    def needs(self, other: Layer) -> bool:
        """Whether it has to come off before the other."""
        required = bool(self.entries) and other.patch.name in self.patch.requires
        return required or self.calls(other)

    def in_place(self) -> bool:
        """Whether nothing is above it in its slots."""
        ours = {id(entry.after) for entry in self.entries}
        return all(id(entry.now()) in ours for entry in self.entries)

    def references(self) -> int:
        """How many references there are to what was ever in place."""
        alive = [function for function in (each() for each in self.made) if function is not None]
        self.made = [weakref.ref(function) for function in alive]
        return len(holders(alive))


_Relation = Callable[[Layer, Layer], bool]


class Stack:
    """The layers of all patches.

    On a slot they lie in the order in which they are given here.  Where somebody else changed a
    slot, the layers below stay until that is undone, and so does what these need.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers = list(layers)

    def make_room(self, layer: Layer) -> list[Layer]:
        """Take off what is to be above a layer that is about to be put; returns these."""
        functions = set(map(id, originals(layer.replacements)))
        higher = self.layers[self.layers.index(layer) + 1 :]
        touching = [each for each in higher if not functions.isdisjoint(each.functions)]
        stack = self._with(touching, lambda a, b: a in higher and a.touches(b))
        return self._peel(stack)

    def take_off(self, layers: Iterable[Layer]) -> list[Layer]:
        """Take layers off, as far as that can be done, and what is above or needs them.

        Returns all that came off.
        """
        stuck = self._stuck()
        free = [layer for layer in layers if layer.entries and layer not in stuck]
        order = self.layers.index

        def follows(layer: Layer, other: Layer) -> bool:
            # Put while somebody else had changed the slot, a lower layer can be above, too.
            return layer.needs(other) or (order(layer) > order(other) and layer.touches(other))

        return self._peel([layer for layer in self._with(free, follows) if layer not in stuck])

    def leave_reloaded(self, layers: Iterable[Layer]) -> list[Layer]:
        """Take layers with a reloaded target off their other targets: a probe has to see the
        original there, too.  Returns all that came off."""
        left = []
        for layer in layers:
            pairs = list(zip(layer.replacements, layer.entries, strict=True))
            kept = [entry for each, entry in pairs if not reloaded(each, layer.entries)]
            if len(kept) < len(pairs):
                layer.former += [entry for entry in layer.entries if entry not in kept]
                layer.entries = kept
                left.append(layer)
        off = self.take_off(left)
        for layer in left:
            layer.former += layer.entries
            layer.entries = []
        return [*off, *(layer for layer in left if layer not in off)]

    def changed(self, layer: Layer) -> list[Entry]:
        """What somebody else changed afterwards."""
        entries = [entry for each in self.layers for entry in each.entries]
        return [entry for entry in layer.entries if not _is_under(entry, entries)]

    def obstacle(self, layer: Layer) -> str:
        """Why a layer cannot come off."""
        if changed := ", ".join(map(str, self.changed(layer))):
            return f"somebody else changed {changed} afterwards"
        stay = [each.patch.name for each in self._stuck() if each.needs(layer)]
        return f"{', '.join(stay)} needs it and cannot be taken back" if stay else ""

    def _stuck(self) -> list[Layer]:
        """The layers that cannot come off."""
        stuck = [layer for layer in self.layers if self.changed(layer)]
        for layer in stuck:  # which grows
            stuck += [each for each in self.layers if each not in stuck and layer.needs(each)]
        return stuck

    def _with(self, layers: Iterable[Layer], follows: _Relation) -> list[Layer]:
        """``layers`` and all that follow from them, the lowest first."""
        found: list[Layer] = []
        more = list(layers)
        while more:
            found += more
            rest = (layer for layer in self.layers if layer not in found)
            more = [layer for layer in rest if any(follows(layer, each) for each in found)]
        return sorted(found, key=self.layers.index)

    def _peel(self, layers: Sequence[Layer]) -> list[Layer]:
        """Take off what is on top until nothing is; returns these.

        Of those on top first what the rest does not need, then the highest.
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
        if not layer.entries or not layer.in_place():
            return False
        return not any(other.calls(layer) for other in self.layers if other is not layer)


def originals(replacements: Iterable[Replacement]) -> list[Any]:
    """The functions that are to be replaced, as far as they are there."""
    functions = []
    for replacement in replacements:
        with suppress(Exception):  # is met, and told, where the layer is put
            functions.append(resolve(replacement).function)
    return functions


def _is_under(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Whether an entry is in place, or under others of these alone."""
    now = entry.now()
    top = next((each for each in entries if each.after is now), None)
    while top is not None and top is not entry:
        top = next((each for each in entries if each.replacement is top.original), None)
    return top is entry


def _restore(entries: Sequence[Entry]) -> None:
    for entry in reversed(entries):
        entry.restore()
