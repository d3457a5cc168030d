"""What a status says of the patches and of the libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError

from . import gate
from .record import BUG_REMAINS, NOT_NEEDED, Record, whole
from .stack import Stack
from .status import About, PatchStatus, State, Status
from .switches import Switches


class Overview:
    """Describes the records of an engine in words."""

    def __init__(
        self, stack: Stack, floors: Mapping[str, str], newest: Mapping[str, str], about: About
    ) -> None:
        self._stack, self._about = stack, about
        self._floors, self._newest = floors, newest

    def describe(
        self, records: Sequence[Record], needs: Callable[[Record, Sequence[State]], str]
    ) -> PatchStatus:
        """The state of a patch: that of its parts which needs attention first."""
        chosen = whole(records)
        texts: dict[str, str] = {}
        for record in records:
            if record is chosen or not (chosen.layer.entries and record.state in NOT_NEEDED):
                text = self._reason(record, needs)
                if record.state is not chosen.state:
                    text = f"{record.state} ({text})" if text else str(record.state)
                texts[record.layer.unit.name] = text
        reason = texts[chosen.layer.unit.name]
        if {*texts.values()} != {reason}:
            reason = "; ".join(f"{part}: {text}" for part, text in texts.items() if text)
        replaced = [str(entry) for record in records for entry in record.layer.entries]
        held = sum(record.held for record in records if record.state is State.APPLIED)
        versions = {name: v for record in records for name, v in record.versions.items()}
        patch = chosen.patch
        parts = {r.layer.unit.name: r.state for r in records} if patch.parts else {}
        return PatchStatus(
            patch.name, chosen.state, reason, patch.symptom, versions, tuple(replaced), held,
            patch.kind.does, parts,
        )  # fmt: skip

    def _reason(self, record: Record, needs_of: Callable[[Record, Sequence[State]], str]) -> str:
        layer, stays, untested = record.layer, "", ""
        if record.unwanted or self._stack.changed(layer):
            stays = self._stack.obstacle(layer)
        needs = needs_of(record, BUG_REMAINS) if layer.entries else ""
        if record.kept and not layer.entries:
            stays = f"{record.kept} reference(s) still point to the patch"
        if record.state in (State.ARMED, State.APPLIED, State.FIXED, State.DRIFTED):
            later = gate.later(record.versions, self._newest)
            untested = f"untested version: {', '.join(later)}" if later else ""
        return "; ".join(filter(None, (record.reason, needs, stays, untested)))

    def status(
        self, entries: Sequence[PatchStatus], broken: Mapping[str, str], switches: Switches
    ) -> Status:
        """The states, and what is to be said of the libraries."""
        libraries = dict(map(_installed, dict.fromkeys((*self._about.required, *self._floors))))
        old = gate.too_old(self._floors)
        missing = [name for name in self._about.required if libraries[name] is None]
        problems = [f"{name} is not installed" for name in missing]
        problems += old.values()
        problems += [f"{name} cannot be imported" for name in broken if name not in old]
        problems += switches.mistakes
        if held := sum(entry.held for entry in entries):
            problems.append(
                f"{held} reference(s) to functions of the libraries are older than the patches and "
                "do without them"
            )
        if any(entry.state is State.APPLIED for entry in entries):
            problems += self._about.problems()
        advice = [f"{name} cannot be imported: {text}" for name, text in broken.items()]
        if old:
            advice.append(gate.upgrade({name: self._floors[name] for name in old}))
        if absent := [name for name, version in libraries.items() if version is None]:
            advice.append(f"not installed: {', '.join(absent)}; pip install {' '.join(absent)}")
        if held:
            advice.append(
                "restart the process, and import this package before those libraries; call "
                "install() before a model is loaded"
            )
        untested = [
            f"untested version: {release} is newer than any measured one; the probe of each patch "
            "decides whether it is applied"
            for release in gate.later(libraries, self._newest)
        ]
        off = {each.name for each in entries if each.state in (State.DISABLED, State.OPTIONAL)}
        notes = [*untested, *switches.late(off)]
        if any(entry.state is State.OPTIONAL for entry in entries):
            notes.append(f"optional patches are faster, but {switches.offer()}")
        about = self._about
        status = about.status(entries, libraries, problems, advice, notes, about)
        if status.off and not problems:
            status.advice += (switches.undo(status.off),)
        return status


def _installed(name: str) -> tuple[str, str | None]:
    """The name and version of a library; an imported one tells its build, as in "2.13.0+cu130"."""
    try:
        version = gate.installed_version(name)
    except PackageNotFoundError:
        return name, None
    imported = getattr(sys.modules.get(name), "__version__", None)
    return name, str(imported or version or "unknown version")
