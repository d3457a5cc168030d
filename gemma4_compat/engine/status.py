"""The states of the patches and their reasons, and whether all is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from .errors import suggestion


class State(str, Enum):
    """The state of one patch in this process."""

    #: switched off by the environment or by ``uninstall()``
    DISABLED = "disabled"
    #: it is faster, but rounds differently or runs a step ahead, and nobody asked for it
    OPTIONAL = "optional"
    #: a library that the patch is for is not installed
    NOT_INSTALLED = "not installed"
    #: a library that the patch is for is older than the oldest supported version
    TOO_OLD = "too old"
    #: the installed versions lie outside the gate, or the module needs a library that is missing
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
    State.NOT_INSTALLED: "for libraries that are not installed",
}
#: the states of patches that need no attention
_USUAL = (*_IN_WORDS, State.APPLIED, State.OPTIONAL, State.TOO_OLD)
#: the states of patches that work, will work, or should
_WANTED = (State.APPLIED, State.ARMED, State.FAILED, State.DRIFTED)


@dataclass(frozen=True)
class PatchStatus:
    """The state of one patch, and the reason for it.

    ``versions`` maps each distribution of the gate to its installed version (``None``: unknown).
    ``replaces`` holds the attributes that an applied patch replaces, as "module.attribute".
    ``held`` is the number of references to the original functions that other code took before the
    patch was applied, and still calls.  ``does`` says in words what patches of its kind do.
    ``parts`` maps the models that a patch is for, if it is put in place for each separately, to
    their states; ``state`` is that which needs attention first, else ``applied`` if one is.
    """

    name: str
    state: State
    reason: str
    symptom: str
    versions: Mapping[str, str | None]
    replaces: tuple[str, ...]
    held: int = 0
    does: str = ""
    parts: Mapping[str, State] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """False if the patch failed or drifted, or cannot be applied to a library this old."""
        return self.state not in (State.FAILED, State.DRIFTED, State.TOO_OLD)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        parts = {name: state.value for name, state in self.parts.items()}
        fields = {"state": self.state.value, "replaces": list(self.replaces), "parts": parts}
        return {**asdict(self), **fields}


class Status:
    """The states of all patches, to iterate over, to index by name or number, and to print.

    Attributes:
        libraries: the patched libraries and their versions (``None``: not installed).
        problems: why this package cannot work here, such as a library that is too old.
        advice: what to do about the problems.
        notes: what else is worth knowing, such as a library newer than any that was measured.
        about: what the status says besides the patches.
        every: whether the text lists every patch, or only those that need attention.
    """

    def __init__(
        self,
        entries: Sequence[PatchStatus],
        libraries: Mapping[str, str | None] | None = None,
        problems: Sequence[str] = (),
        advice: Sequence[str] = (),
        notes: Sequence[str] = (),
        about: About | None = None,
    ) -> None:
        self._entries, self.about = tuple(entries), about or About()
        self.libraries, self.problems = dict(libraries or {}), tuple(problems)
        self.advice, self._notes, self.every = tuple(advice), tuple(notes), False

    @property
    def notes(self) -> tuple[str, ...]:
        # Asked when they are read: `install` and `disabled` return a status, too.
        return (*self.about.notes(), *self._notes)

    def __getitem__(self, key: int | str) -> PatchStatus:
        if isinstance(key, str):
            meant = self.about.renamed(key)
            for entry in self._entries:
                if entry.name == meant:
                    return entry
            names = [entry.name for entry in self._entries]
            raise KeyError(f"no patch is named {key!r}{suggestion(key, names)}")
        return self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PatchStatus]:
        return iter(self._entries)

    @property
    def off(self) -> tuple[str, ...]:
        """What switched patches off, if no other patch does anything here; else empty."""
        if any(each.state in _WANTED for each in self):
            return ()
        off = [each.reason.partition(";")[0] for each in self if each.state is State.DISABLED]
        return tuple(dict.fromkeys(off))

    @property
    def ok(self) -> bool:
        """Whether the patches that are needed here are in place.

        False if they cannot work here, if one failed or drifted, and if patches are switched off
        and no other does anything here.
        """
        return not self.problems and not self.off and all(entry.ok for entry in self)

    @property
    def exit_code(self) -> int:
        """0 if all is well, or if all patches are off because somebody asked for that."""
        return 0 if self.ok or (self.off and not self.problems) else 1

    @property
    def verdict(self) -> str:
        """What is wrong; if nothing is, the number of patches in each state."""
        if self.problems:
            return f"NOT well: {'; '.join(self.problems)}"
        if by := self.off:
            number = sum(each.state is State.DISABLED for each in self)
            many = f"all {number}" if number == len(self) else f"{number} of {len(self)}"
            rest = "" if number == len(self) else ", and no other is applied"
            more = f" and {len(by) - 3} more" if len(by) > 3 else ""
            return f"OFF: {many} patches are switched off by {', '.join(by[:3])}{more}{rest}"
        states = Counter(_IN_WORDS.get(entry.state, entry.state.value) for entry in self)
        kinds = Counter(each.does for each in self if each.state is State.APPLIED and each.does)
        does = ", ".join(f"{number} {does}" for does, number in kinds.most_common())
        counts = ", ".join(
            f"{number} {state}" + (f" ({does})" if does and state == State.APPLIED.value else "")
            for state, number in states.most_common()
        )
        return f"{'all well' if self.ok else 'NOT well'}: {counts or 'no patches'}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "title": self.about.title,
            "ok": self.ok,
            "verdict": self.verdict,
            "libraries": self.libraries,
            "problems": list(self.problems),
            "advice": list(self.advice),
            "notes": list(self.notes),
            "patches": {entry.name: entry.as_dict() for entry in self},
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.verdict}>"

    @property
    def shown(self) -> tuple[PatchStatus, ...]:
        """The patches that the text lists."""
        usual = (*_USUAL, State.DISABLED) if self.off else _USUAL
        return tuple(each for each in self if self.every or each.state not in usual)

    def __str__(self) -> str:
        texts = (self.about.title, self.verdict, *self.advice, *self.notes)
        patches = (f"{each.name}  {each.state}  {each.reason}" for each in self.shown)
        return "\n".join(filter(None, (*texts, *patches)))


@dataclass(frozen=True)
class About:
    """What a status says of the package and its libraries, besides the patches.

    ``title`` is its first line.  ``hints`` are the paragraphs before the patches: one if they are
    those that need attention, one if they are all.  ``notes`` returns what else is worth knowing,
    and ``problems`` what makes the verdict bad.  ``required`` are the libraries without which
    nothing works.  ``status`` is the class of the status.  ``renamed`` returns the present name of
    a patch.
    """

    title: str = ""
    hints: tuple[str, str] = ("", "")
    notes: Callable[[], Iterable[str]] = tuple
    problems: Callable[[], Iterable[str]] = tuple
    required: Sequence[str] = ()
    status: type[Status] = Status
    renamed: Callable[[str], str] = str
