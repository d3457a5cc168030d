"""The states of the patches and their reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from ..errors import suggestion


class State(str, Enum):
    """The state of one patch in this process."""

    #: switched off by the environment or by ``uninstall()``
    DISABLED = "disabled"
    #: a library that the patch is for is not installed
    NOT_INSTALLED = "not installed"
    #: the installed versions lie outside the gate
    UNAFFECTED = "unaffected"
    #: the versions lie inside the gate, but the probe found the bug gone
    FIXED = "fixed upstream"
    #: it requires another patch, which is disabled, failed or drifted; nothing is changed
    BLOCKED = "blocked"
    #: waiting for its targets to be imported; nothing is changed yet
    ARMED = "armed"
    #: the replacements are in place
    APPLIED = "applied"
    #: the target is not as the patch expects; nothing is changed
    DRIFTED = "drifted"
    #: the patch or its probe raised; its changes were undone
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


#: for those who do not know the states
_IN_WORDS = {
    State.UNAFFECTED: "not needed here",
    State.FIXED: "not needed here",
    State.ARMED: "waiting for an import",
}


@dataclass(frozen=True)
class PatchStatus:
    """The state of one patch, and the reason for it.

    ``versions`` maps each distribution of the gate to its installed version (``None``: unknown).
    ``replaces`` holds the attributes that an applied patch replaces, as "module.attribute".
    """

    name: str
    state: State
    reason: str
    symptom: str
    versions: Mapping[str, str | None]
    replaces: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """False if the patch failed or drifted."""
        return self.state not in (State.FAILED, State.DRIFTED)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "state": self.state.value, "replaces": list(self.replaces)}


class Status:
    """The states of all patches, to iterate over, to index by name or number, and to print."""

    def __init__(self, entries: Sequence[PatchStatus]) -> None:
        self._entries = tuple(entries)

    def __getitem__(self, key: int | str) -> PatchStatus:
        if isinstance(key, str):
            for entry in self._entries:
                if entry.name == key:
                    return entry
            names = [entry.name for entry in self._entries]
            raise KeyError(f"no patch is named {key!r}{suggestion(key, names)}")
        return self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PatchStatus]:
        return iter(self._entries)

    @property
    def ok(self) -> bool:
        """False if a patch failed or drifted."""
        return all(entry.ok for entry in self)

    @property
    def verdict(self) -> str:
        """Whether all is well, and the number of patches in each state."""
        states = Counter(_IN_WORDS.get(entry.state, entry.state.value) for entry in self)
        counts = ", ".join(f"{number} {state}" for state, number in states.most_common())
        return f"{'all well' if self.ok else 'NOT well'}: {counts or 'no patches'}"

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data, one entry per patch."""
        return {entry.name: entry.as_dict() for entry in self._entries}

    def __str__(self) -> str:
        if not self._entries:
            return "no patches"
        name = max(len(entry.name) for entry in self)
        state = max(len(entry.state.value) for entry in self)
        return "\n".join(
            f"{entry.name:<{name}}  {entry.state.value:<{state}}  {entry.reason}".rstrip()
            for entry in self
        )

    __repr__ = __str__
