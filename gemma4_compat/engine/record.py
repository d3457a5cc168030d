"""What the engine knows of one patch, or of one part of it, and the order of these."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from .patch import Patch
from .stack import Layer
from .status import State

#: In these states of a required patch, the bug that it fixes is gone.
BUG_GONE = (State.APPLIED, State.UNAFFECTED, State.FIXED, State.NOT_INSTALLED)
#: In these states it remains.  In any other state, the patch that requires it waits.
BUG_REMAINS = (
    State.DISABLED, State.OPTIONAL, State.BLOCKED, State.DRIFTED, State.FAILED, State.TOO_OLD
)  # fmt: skip
#: In these states of one part, there is nothing to say if another part is applied.
NOT_NEEDED = (State.UNAFFECTED, State.FIXED, State.NOT_INSTALLED)
#: The state of a patch is that of its parts which comes first here.
_ORDER = (
    State.FAILED, State.DRIFTED, State.APPLIED, State.BLOCKED, State.ARMED, State.DISABLED,
    State.OPTIONAL, State.TOO_OLD, State.FIXED, State.UNAFFECTED, State.NOT_INSTALLED,
)  # fmt: skip


@dataclass(eq=False)
class Record:
    """The engine's data about one patch, or about one part of it."""

    layer: Layer
    #: whether it is applied if it can be; one of the kind ``FAST`` has to be asked for
    asked: bool
    state: State = State.DISABLED
    reason: str = "not installed yet"
    #: whether it should have been undone but could not be
    unwanted: bool = False
    #: whether it was installed by name after the import of what it replaces
    is_late: bool = False
    #: how many references to the originals other code took before
    held: int = 0
    #: how many references to its replacements existed when it was undone
    kept: int = 0
    #: how many references to each original existed then: as many later, if nothing took one
    then: list[int] | None = None
    #: how many blocks of ``disabled`` are open
    blocks: int = 0
    #: whether it is on after them
    outside: bool = False
    logged: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    #: those of its targets, once it is armed
    modules: Collection[str] = ()

    @property
    def patch(self) -> Patch:
        return self.layer.patch

    @property
    def name(self) -> str:
        """The name of the patch, and of the part if it has several."""
        unit = self.layer.unit
        return unit.name if unit is self.patch else f"{self.patch.name} ({unit.name})"


def required_first(parts: Mapping[str, list[Record]]) -> list[Record]:
    """The records that require others, ordered so that each follows those that it requires."""
    graph = {name: records[0].patch.requires for name, records in parts.items()}
    order = (name for name in TopologicalSorter(graph).static_order() if graph[name])
    return [record for name in order for record in parts[name]]


def whole(records: Sequence[Record]) -> Record:
    """The part whose state is that of the whole patch."""
    return min(records, key=lambda record: _ORDER.index(record.state))


def state_of(record: Record) -> str:
    """The state, and what switched the patch off."""
    is_off = record.state is State.DISABLED
    return f"disabled by {record.reason}" if is_off else str(record.state)
