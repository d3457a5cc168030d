"""The engine: arms patches, applies them when their targets are there, takes them back."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import wrapt

from . import gate, journal
from .gate import Outcome
from .journal import Entry
from .patch import Patch, Replacement, Verdict, broken
from .status import PatchStatus, State, Status
from .switches import Switch, Switches


class PatchError(RuntimeError):
    """Raised instead of a warning where the strict switch is on."""


@dataclass(eq=False)
class _Record:
    """What the engine knows of one patch."""

    patch: Patch
    state: State = State.DISABLED
    reason: str = ""
    entries: list[Entry] = field(default_factory=list)

    @property
    def replacements(self) -> list[Replacement]:
        """The replacements that exist on the installed versions."""
        return [r for r in self.patch.replacements if r.when is None or gate.holds(r.when)]

    def in_place(self) -> bool:
        return all(entry.in_place() for entry in self.entries)


class Engine:
    """Arms, applies and takes back a fixed set of patches in this process."""

    def __init__(
        self, patches: Iterable[Patch], switches: Switches, logger: logging.Logger
    ) -> None:
        self._records = {patch.name: _Record(patch) for patch in patches}
        self._switches = switches
        self._logger = logger
        self._applied: list[_Record] = []
        self._hooked: set[str] = set()
        self._complete: set[str] = set()
        self._warned: set[tuple[str, str]] = set()
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            # Another thread may hold the lock while this one forks.
            os.register_at_fork(after_in_child=self._renew_lock)

    @property
    def names(self) -> list[str]:
        """The names of all patches."""
        return list(self._records)

    # -- public verbs -----------------------------------------------------------------------

    def install(self, *names: str) -> Status:
        """Arm or apply the named patches (all without names).  Idempotent."""
        records = self._select(names)
        with self._lock:
            for record in records:
                if record.state is not State.APPLIED:
                    self._arm(record)
        for record in records:
            for module in self._waiting(record):
                self._hook(module)
        return self.status()

    def uninstall(self, *names: str) -> Status:
        """Take the named patches back (all without names), to the last descriptor."""
        records = self._select(names)
        with self._lock:
            # Patches stacked later on a slot of these come off first and go back on afterwards.
            slots = {entry.slot for record in records for entry in record.entries}
            first = min((self._applied.index(r) for r in records if r in self._applied), default=0)
            stacked = [
                record
                for record in self._applied[first:]
                if record in records or any(entry.slot in slots for entry in record.entries)
            ]
            for record in reversed(stacked):
                self._take_back(record)
            for record in records:
                if record.state is not State.APPLIED:
                    self._set(record, State.DISABLED, "uninstalled")
            for record in stacked:
                if record not in records and record.state is not State.APPLIED:
                    self._apply(record)
        return self.status()

    def status(self) -> Status:
        """The states of all patches now; applies again where a target module was reloaded."""
        with self._lock:
            self._refresh()
            return Status([self._describe(record) for record in self._records.values()])

    def import_targets(self) -> Status:
        """Import what armed patches wait for, so that their states are final."""
        for record in self._records.values():
            for module in self._waiting(record):
                try:
                    importlib.import_module(module)
                except Exception as error:  # a half-installed library is the user's news too
                    with self._lock:
                        self._set(record, State.FAILED, f"cannot import {module}: {error}")
                    break
        return self.status()

    @contextmanager
    def switched(self, names: Sequence[str], *, on: bool) -> Iterator[Status]:
        """Switch patches on or off inside a ``with`` block, and back afterwards."""
        records = self._select(names)
        change, undo = (self.install, self.uninstall) if on else (self.uninstall, self.install)
        changing = [r.patch.name for r in records if (r.state is State.DISABLED) is on]
        try:
            yield change(*changing) if changing else self.status()
        finally:
            if changing:
                undo(*changing)

    # -- the life of one patch ----------------------------------------------------------------

    def _arm(self, record: _Record) -> None:
        name = record.patch.name
        switch = self._switches.of(name)
        if not self._switches.everything:
            return self._set(record, State.DISABLED, f"{self._switches.prefix}=0")
        if switch is Switch.OFF:
            return self._set(record, State.DISABLED, f"{self._switches.variable(name)}=0")
        verdict = gate.evaluate(record.patch.affects)
        if verdict.outcome is Outcome.MISSING:
            return self._set(record, State.NOT_INSTALLED, verdict.reason)
        if verdict.outcome is Outcome.OUTSIDE and switch is not Switch.FORCE:
            return self._set(record, State.UNAFFECTED, verdict.reason)
        self._set(record, State.ARMED, "")
        self._advance(record)

    def _advance(self, record: _Record) -> None:
        """Apply the patch if all its targets are imported, else say what it waits for."""
        waiting = self._waiting(record)
        if waiting:
            self._set(record, State.ARMED, f"waits for the import of {', '.join(waiting)}")
        else:
            self._apply(record)

    def _apply(self, record: _Record) -> None:
        patch = record.patch
        written: list[Entry] = []
        held = 0
        try:
            found = patch.find() if patch.find else broken()
            if found.verdict is not Verdict.BROKEN:
                state = State.FIXED if found.verdict is Verdict.FIXED else State.DRIFTED
                return self._set(record, state, found.reason)
            # One target after the other, so that two replacements of one slot stack.
            for replacement in record.replacements:
                entries = journal.prepare(replacement)
                for entry in entries:
                    entry.write()
                    written.append(entry)
                if replacement.module not in self._hooked:
                    held += journal.unreachable(entries)
        except Exception as error:
            for entry in reversed(written):
                entry.restore()
            if isinstance(error, journal.Missing):
                return self._set(record, State.DRIFTED, str(error))
            self._logger.debug("%s failed", patch.name, exc_info=True)
            return self._set(record, State.FAILED, f"{type(error).__name__}: {error}")
        # After a reload the classes of before live on in the user's objects, patched.
        record.entries = [entry for entry in record.entries if entry.in_place()] + written
        if record not in self._applied:
            self._applied.append(record)
        said = f"{held} reference(s) taken before the patch keep the original" if held else ""
        self._set(record, State.APPLIED, said)

    def _take_back(self, record: _Record) -> None:
        """Undo all of a patch, or none of it where somebody patched over it."""
        covered = [entry for entry in record.entries if not entry.captured and not entry.in_place()]
        if covered:
            names = ", ".join(map(str, covered))
            self._set(record, State.APPLIED, f"not taken back: somebody changed {names} after us")
            return self._warn(record, record.reason)
        for entry in reversed(record.entries):
            entry.restore()
        record.entries = []
        self._applied.remove(record)
        record.state = State.DISABLED

    def _refresh(self) -> None:
        for record in self._records.values():
            if record.state is State.ARMED:
                self._advance(record)
            elif record.state is State.APPLIED and not record.in_place():
                if any(journal.reloaded(entry, record.replacements) for entry in record.entries):
                    self._apply(record)

    def _set(self, record: _Record, state: State, reason: str) -> None:
        changed = (record.state, record.reason) != (state, reason)
        record.state, record.reason = state, reason
        if not changed:
            return
        name = record.patch.name
        if state is State.APPLIED:
            self._logger.info("%s: applied%s", name, f" ({reason})" if reason else "")
        elif state in (State.DRIFTED, State.FAILED):
            if self._switches.strict:
                raise PatchError(f"{name} {state}: {reason}")
            self._warn(record, f"{state}: {reason}; stepping aside")
        else:
            self._logger.debug("%s: %s (%s)", name, state, reason)

    def _warn(self, record: _Record, text: str) -> None:
        if (record.patch.name, text) not in self._warned:
            self._warned.add((record.patch.name, text))
            self._logger.warning("%s: %s", record.patch.name, text)

    # -- imports --------------------------------------------------------------------------------

    def _hook(self, name: str) -> None:
        """Apply waiting patches as soon as module ``name`` is imported."""
        with self._lock:
            if name in self._hooked:
                return
            self._hooked.add(name)
        registering: int | None = threading.get_ident()

        def imported(module: object) -> None:
            # wrapt calls at once, from within the registration, where the module is in
            # sys.modules: perhaps in the middle of its import, with half its names.
            if registering != threading.get_ident():
                self._complete.add(name)
            self._after_import()

        wrapt.register_post_import_hook(imported, name)
        registering = None
        if name in sys.modules and not self._is_imported(name):
            # Another thread is importing it: wait for that.  (In the middle of our own thread's
            # import this returns at once, and the patch stays armed until the next occasion.)
            importlib.import_module(name)
            self._after_import()

    def _after_import(self) -> None:
        """Runs inside the user's import, which an exception would break."""
        try:
            with self._lock:
                self._refresh()
        except PatchError:
            raise
        except Exception:
            self._logger.warning("internal error after an import", exc_info=True)

    def _is_imported(self, name: str) -> bool:
        """Imported to the end; inside a post-import hook, the import system says "not yet"."""
        module = sys.modules.get(name)
        if module is None:
            return False
        initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
        return name in self._complete or not initializing

    def _waiting(self, record: _Record) -> list[str]:
        if record.state is not State.ARMED:
            return []
        modules = dict.fromkeys(replacement.module for replacement in record.replacements)
        return [module for module in modules if not self._is_imported(module)]

    # -- bookkeeping ----------------------------------------------------------------------------

    def _select(self, names: Sequence[str]) -> list[_Record]:
        unknown = [name for name in names if name not in self._records]
        if unknown:
            valid = ", ".join(self._records)
            raise ValueError(f"no patch named {', '.join(unknown)}; there are: {valid}")
        return [self._records[name] for name in names or self._records]

    def _describe(self, record: _Record) -> PatchStatus:
        patch = record.patch
        versions = gate.evaluate(patch.affects).versions
        return PatchStatus(patch.name, record.state, record.reason, patch.symptom, versions)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()
