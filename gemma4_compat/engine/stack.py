"""The replacements that each patch has in place, and the attributes that they are around."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from . import gate
from .patch import Copied, Part, Patch, Replacement
from .slots import Entry, Slot, former, rebind, resolve

logger = logging.getLogger(__name__)


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
        return [r for unit in self._units for r in unit.replacements if _exists(r)]

    @property
    def copied(self) -> list[Copied]:
        """The functions that these replacements copy."""
        return [c for unit in self._units for c in unit.copied if _exists(c)]

    @property
    def _units(self) -> list[Part | Patch]:
        return [*dict.fromkeys((self.unit, self.patch))]

    @property
    def has_first(self) -> bool:
        """Whether a part of the patch has the replacements of the whole patch in place."""
        return any(layer.is_first for layer in self.siblings)

    @property
    def to_put(self) -> list[Replacement]:
        """Its replacements, without those of the whole patch that another part has in place."""
        whole = self.patch.replacements if self.has_first else ()
        return [each for each in self.replacements if each not in whole]

    @property
    def names(self) -> list[str]:
        """The names that its replacements read, without those of other parts' modules."""
        others = {r.module for part in self.patch.parts for r in part.replacements}
        others -= {r.module for r in self.unit.replacements}
        theirs = tuple(f"{module}." for module in others)
        return [name for name in self.patch.names if not name.startswith(theirs)]

    def needs(self, other: Layer) -> bool:
        """Whether it must not stay without the other layer."""
        if self.patch is other.patch:
            return other.is_first and self is not other and bool(self.entries)
        return bool(self.entries) and other.patch.name in self.patch.requires

    def inherits(self, other: Layer) -> bool:
        """Whether it is around an attribute that is inherited from one of the other layer."""
        return any(own.slot.inherits(e.slot) for own in self.entries for e in other.entries)

    def alive(self) -> list[Any]:
        """Its replacements, present or former, that are still referenced."""
        alive = [function for function in (each() for each in self.made) if function is not None]
        self.made[:] = [weakref.ref(function) for function in alive]
        return alive


class Stack:
    """The layers of all patches, and the attributes that they replace.

    The layers that replace one attribute are around it in the order of ``layers``, the last one
    outermost.  When one is put or removed, the attribute is built again from those that are left.
    If other code has changed the attribute, its layers stay until that is undone, and so do the
    layers that they need.
    """

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        #: removed with others, because a factory failed; to be put again
        self.lost: list[Layer] = []
        self._slots: list[Slot] = []
        #: by id: a function that other modules may have, and the present one in its place
        self._moved: dict[int, tuple[Any, Any]] = {}

    def put(self, layer: Layer) -> None:
        """Put all replacements of a layer in place, or none.

        Raises:
            Mismatch: a target does not exist, is no function, or accepts calls that the replacement
                would refuse.
            TypeError: a factory did not return a plain function.
        """
        order, is_first = self.layers.index(layer), not layer.has_first
        try:
            for place in layer.to_put:
                self._add(layer, place, order)
        except BaseException:
            self._remove([layer])
            raise
        layer.is_first = is_first

    def take_off(self, layers: Iterable[Layer]) -> list[Layer]:
        """Remove those of the layers that can be removed, and those that need them.

        Returns all removed layers.
        """
        stuck = self._stuck()
        removed = [layer for layer in layers if layer.entries and layer not in stuck]
        for layer in removed:  # the list grows meanwhile
            removed += [e for e in self.layers if e not in removed and e.needs(layer)]
        removed = self._remove(removed)
        for layer in removed:
            try:
                if layer.patch.release is not None:
                    layer.patch.release()
            except Exception:
                logger.warning("%s: on_revert failed", layer.patch.name, exc_info=True)
        return removed

    def settle(self) -> None:
        """Rebind what was put and removed since the last time in all modules: that takes 20 ms."""
        rebind(self._moved.values(), [*sys.modules.values()])
        self._moved = {}

    def keepers(self) -> set[int]:
        """The ids of what may keep referring to the originals: the engine, and what it made."""
        entries = [entry for slot in self._slots for entry in slot.entries]
        return {*map(id, former()), *(id(each) for entry in entries for each in entry.keepers())}

    def changed(self, layer: Layer) -> list[Entry]:
        """The layer's entries whose attributes other code changed afterwards."""
        return [entry for entry in layer.entries if entry.is_changed]

    def obstacle(self, layer: Layer) -> str:
        """Why a layer cannot be removed; "" if it can."""
        stuck = self._stuck()
        if layer not in stuck:
            return ""
        around = [each for entry in layer.entries for each in entry.slot.entries]
        changed = self.changed(layer) or [each for each in around if each.is_changed]
        if names := ", ".join(map(str, changed)):
            return f"other code changed {names} afterwards"
        stay = [each.patch.name for each in stuck if each.needs(layer) or each.inherits(layer)]
        return f"{', '.join(dict.fromkeys(stay))} needs it and cannot be uninstalled"

    def _stuck(self) -> list[Layer]:
        """The layers that cannot be removed."""
        slots = [slot for slot in self._slots if slot.is_changed]
        for slot in slots:  # both lists grow meanwhile
            slots += [each for each in self._slots if each not in slots and slot.inherits(each)]
        stuck = [layer for layer in self.layers if any(e.slot in slots for e in layer.entries)]
        for layer in stuck:
            stuck += [each for each in self.layers if each not in stuck and layer.needs(each)]
        return stuck

    def _add(self, layer: Layer, place: Replacement, order: int) -> None:
        target = resolve(place)
        slot = next((each for each in self._slots if each.holds(target)), None) or Slot(target)
        del target  # `rebuild` would count its reference to the value
        entry = Entry(place, slot, made=layer.made, order=order)
        index = sum(each.order <= order for each in slot.entries)
        slot.entries.insert(index, entry)
        try:
            pair = slot.rebuild(index)
        except BaseException:
            slot.entries.remove(entry)
            raise
        layer.entries.append(entry)
        self._slots += [] if slot in self._slots else [slot]
        self._move([pair])
        if failed := self._follow([slot]):
            self.lost += failed
            self._remove(failed)

    def _remove(self, layers: Sequence[Layer]) -> list[Layer]:
        """Remove layers, and those whose factory fails now; returns all removed."""
        leaving = {id(entry) for layer in layers for entry in layer.entries}
        changed, pairs, failed = [], [], []
        # Those that need others come after them in ``layers``.
        slots = [entry.slot for layer in reversed(layers) for entry in layer.entries]
        for slot in dict.fromkeys(slots):
            numbers = (n for n, entry in enumerate(slot.entries) if id(entry) in leaving)
            if (first := next(numbers, None)) is None:
                continue
            slot.entries = [entry for entry in slot.entries if id(entry) not in leaving]
            try:
                pair = slot.rebuild(first)
            except Exception:
                lost, slot.entries = slot.entries[first:], slot.entries[:first]
                failed += self._layers_of(lost)
                pair = slot.rebuild(first)
            pairs.append(pair)
            changed.append(slot)
        for layer in layers:
            layer.entries, layer.is_first = [], False
        self._slots = [slot for slot in self._slots if slot.entries]
        self._move(pairs)
        failed += self._follow(changed)
        self.lost += failed
        return [*layers, *(self._remove(failed) if failed else ())]

    def _move(self, pairs: Iterable[tuple[Any, Any] | None]) -> None:
        """Rebind functions at once where probes and other layers look: the modules of targets."""
        for old, new in filter(None, pairs):
            moved = (*self._moved.values(), (old, old))
            self._moved = {id(f): (f, new if now is old else now) for f, now in moved}
        targets = (each for layer in self.layers for each in layer.patch.targets)
        names = {each.module for each in targets} if self._moved else ()
        rebind(self._moved.values(), map(sys.modules.get, names))

    def _layers_of(self, entries: Iterable[Entry]) -> list[Layer]:
        some = {*entries}
        return [layer for layer in self.layers if some & {*layer.entries}]

    def _follow(self, changed: list[Slot]) -> list[Layer]:
        """Build again what inherits the value of a changed slot; returns the layers that failed."""
        failed: list[Layer] = []
        for slot in changed:  # the list grows meanwhile
            for each in self._slots:
                is_old = each.inherits(slot) and each.entries[0].raw is not each.original
                if is_old and not each.is_changed:
                    try:
                        each.rebuild()
                    except Exception:
                        failed += self._layers_of(each.entries)
                        continue
                    changed.append(each)
        return failed


def _exists(place: Copied | Replacement) -> bool:
    """Whether the installed versions have it."""
    return place.when is None or gate.holds(place.when)


def originals(replacements: Iterable[Replacement]) -> list[Any]:
    """The functions that the replacements will replace, if they exist."""
    functions = []
    for replacement in replacements:
        with suppress(Exception):  # the error occurs again, and is logged, when the layer is put
            functions.append(resolve(replacement).function)
    return functions
