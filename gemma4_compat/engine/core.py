"""The engine: arms patches, applies them when their targets are there, takes them back."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import wrapt

from ..errors import PatchError
from . import gate, journal
from .gate import Outcome
from .journal import Entry
from .patch import Finding, Patch, Replacement, Verdict, broken, drifted
from .status import PatchStatus, State, Status
from .switches import Switch, Switches

#: Seconds that an import, or a fork, waits for another thread's use of the engine.  It may not
#: wait for ever: that thread may be waiting for the lock of a module that this one is importing.
_PATIENCE = 5.0

#: The engine of each prefix.  Here it outlives this package's being dropped from sys.modules; the
#: engine of the next import takes over from it.
_ENGINES: dict[str, Engine] = vars(sys).setdefault("_version_gated_patch_engines", {})


@dataclass(eq=False)
class _Record:
    """What the engine knows of one patch."""

    patch: Patch
    state: State = State.DISABLED
    reason: str = "not installed yet"
    #: what is in place
    entries: list[Entry] = field(default_factory=list)
    #: what was in place in a module that was reloaded since: its old classes live on in objects
    former: list[Entry] = field(default_factory=list)
    #: every replacement that it ever put in place, as long as somebody holds it
    made: list[weakref.ref[Any]] = field(default_factory=list)
    #: whether it was to be taken back, and could not
    unwanted: bool = False
    said: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)

    @property
    def replacements(self) -> list[Replacement]:
        """The replacements that exist on the installed versions."""
        return [r for r in self.patch.replacements if r.when is None or gate.holds(r.when)]

    @property
    def functions(self) -> set[int]:
        """The identities of the functions it replaced and put in place.

        Two applied patches that have one in common are stacked on a slot.
        """
        return {id(f) for entry in self.entries for f in (entry.original, entry.replacement)}

    def calls(self, other: _Record) -> bool:
        """Whether it replaced a replacement of the other, perhaps an inherited one."""
        theirs = {id(entry.replacement) for entry in other.entries}
        return any(id(entry.original) in theirs for entry in self.entries)

    def references(self) -> int:
        """How many references there are to what it once put in place."""
        alive = [function for function in (each() for each in self.made) if function is not None]
        self.made = [weakref.ref(function) for function in alive]
        return len(journal.holders(alive))

    def in_place(self) -> bool:
        """Whether nothing is above what it put in place."""
        ours = {id(entry.after) for entry in self.entries}
        return all(id(entry.now()) in ours for entry in self.entries)

    def changed(self, patches: Iterable[_Record]) -> list[Entry]:
        """What is neither in place nor right under a replacement of one of ``patches`` that is."""
        entries = [entry for record in patches for entry in record.entries]
        return [entry for entry in self.entries if not entry.is_under(entries)]


class Engine:
    """Arms, applies and takes back a fixed set of patches in this process.

    Patches of one slot are stacked in the order in which they are given here, in whatever order
    they are applied.  ``newest`` holds the newest version of each distribution that the patches
    were tested on: of a later one the status says so.
    """

    def __init__(
        self,
        patches: Iterable[Patch],
        switches: Switches,
        logger: logging.Logger,
        newest: Mapping[str, str] | None = None,
    ) -> None:
        self._records = {patch.name: _Record(patch) for patch in patches}
        self._switches = switches
        self._logger = logger
        self._newest = newest or {}
        self._hooked: set[str] = set()
        self._complete: dict[str, Any] = {}
        self._warned: set[tuple[str, str]] = set()
        self._failures: list[str] = []
        self._lock = threading.RLock()
        self._busy = False
        self._stale = False
        self._undecided = False
        if hasattr(os, "register_at_fork"):
            # A child must neither inherit a lock that nobody holds nor half a patch.
            os.register_at_fork(
                before=lambda: self._lock.acquire(timeout=_PATIENCE),
                after_in_parent=self._after_fork,
                after_in_child=lambda: self._after_fork(child=True),
            )
        predecessor = _ENGINES.get(switches.prefix)
        _ENGINES[switches.prefix] = self
        if predecessor is not None:
            predecessor.retire()

    @property
    def names(self) -> list[str]:
        """The names of all patches."""
        return list(self._records)

    # -- public verbs -----------------------------------------------------------------------

    def start(self) -> None:
        """Arm everything, at the least cost: gates are asked when a target is imported.

        Or at once, if one is already, and whenever somebody wants to know.
        """
        modules = {r.module for record in self._records.values() for r in record.patch.replacements}
        if any(module.partition(".")[0] in sys.modules for module in modules):
            self.install()
        else:
            self._undecided = True
            for module in sorted(modules):
                self._hook(module)

    def install(self, *names: str) -> Status:
        """Arm or apply the named patches (all without names).  Idempotent."""
        records = self._select(names)
        with self._lock:
            self._decide()
            for record in records:
                record.unwanted = False
                if record.state is not State.APPLIED:
                    self._arm(record)
        self._settle()
        for record in records:
            for module in self._waiting(record):
                self._hook(module)
        return self.status()

    def uninstall(self, *names: str) -> Status:
        """Take the named patches back (all without names), to the last descriptor."""
        records = self._select(names)
        with self._lock:
            self._decide()
            self._take_back(records)
            for record in records:
                if record.entries:
                    record.unwanted = True
                    self._warn(record, f"not taken back: {self._obstacle(record)}")
                elif record.state is not State.DISABLED:
                    self._set(record, State.DISABLED, "uninstalled")
            for record in reversed(self._records.values()):
                if record.state is State.DISABLED:
                    for entry in reversed(record.former):
                        entry.restore()
            self._stale = True
            self._settle()
            for record in self._records.values():
                if record.state is State.DISABLED and record.made:
                    kept = record.references()
                    text = f"; {kept} reference(s) taken before keep the patch" if kept else ""
                    record.reason = f"uninstalled{text}"
        return self.status()

    def status(self) -> Status:
        """The states of all patches now; applies again where a target module was reloaded."""
        self._stale = True
        self._settle()
        with self._lock:
            return Status([self._describe(record) for record in self._records.values()])

    def import_targets(self) -> Status:
        """Import what armed patches wait for, so that their states are final."""
        self.status()
        for record in list(self._records.values()):
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
        self.status()
        change, undo = (self.install, self.uninstall) if on else (self.uninstall, self.install)
        changing = [r.patch.name for r in records if (r.state is State.DISABLED) is on]
        try:
            yield change(*changing) if changing else self.status()
        finally:
            if changing:
                undo(*changing)

    def retire(self) -> None:
        """Take everything back and do nothing any more."""
        self.uninstall()
        self._records = {}

    # -- the life of one patch ----------------------------------------------------------------

    def _decide(self) -> None:
        """Ask the gates that ``start`` left alone."""
        if self._undecided:
            self._undecided = False
            for record in self._records.values():
                self._arm(record)

    def _arm(self, record: _Record) -> None:
        name = record.patch.name
        switch = self._switches.of(name)
        try:
            found = gate.evaluate(record.patch.affects)
            record.versions = found.versions
            record.replacements  # noqa: B018  (reads the gates of the single replacements)
        except ValueError as error:
            return self._set(record, State.FAILED, f"cannot read its gate: {error}")
        if not self._switches.everything:
            return self._set(record, State.DISABLED, f"{self._switches.prefix}=0")
        if switch is Switch.OFF:
            return self._set(record, State.DISABLED, f"{self._switches.variable(name)}=0")
        if found.outcome is Outcome.MISSING:
            return self._set(record, State.NOT_INSTALLED, found.reason)
        if found.outcome is Outcome.OUTSIDE and switch is not Switch.FORCE:
            return self._set(record, State.UNAFFECTED, found.reason)
        record.said = ""
        self._stale = True
        return self._set(record, State.ARMED, "")

    def _settle(self, timeout: float = -1) -> None:
        """Bring all patches as far as they can go; again, if modules were imported meanwhile.

        With a timeout this may leave the work to the thread that has the lock.
        """
        while self._stale and self._lock.acquire(timeout=timeout):
            try:
                if self._busy:  # called by a probe or a factory, or by an import in one
                    return
                self._busy, self._stale = True, False
                try:
                    self._advance()
                finally:
                    self._busy = False
                failures, self._failures = self._failures, []
            finally:
                self._lock.release()
            if failures:
                raise PatchError("; ".join(failures))

    def _advance(self) -> None:
        self._decide()
        self._leave_reloaded()
        armed, ready = [], []
        for record in self._records.values():
            if record.state is State.ARMED:
                armed.append(record)
                waiting = ", ".join(self._waiting(record))
                if waiting:
                    self._set(record, State.ARMED, f"waits for the import of {waiting}")
                else:
                    ready.append(record)
        # Only where we came late: what happens between two imports of the libraries themselves
        # is not worth a scan of all objects in each.
        targets = [
            r for record in ready for r in record.replacements if r.module not in self._hooked
        ]
        holders = journal.holders(_originals(targets))
        for record in self._records.values():
            if record.state is State.ARMED and not self._waiting(record):
                self._apply(record)
        for record in self._records.values():
            if record in armed and record.state is State.APPLIED:
                held = journal.count_held(holders, record.entries)
                text = f"{held} reference(s) taken before the patch keep the original"
                self._set(record, State.APPLIED, text if held else "")

    def _apply(self, record: _Record) -> None:
        """Ask the probe, then put all replacements in place, or none."""
        written: list[Entry] = []
        try:
            self._make_room(record)
            found = self._ask(record.patch)
            if found.verdict is not Verdict.BROKEN:
                state = State.FIXED if found.verdict is Verdict.FIXED else State.DRIFTED
                return self._set(record, state, found.reason)
            # One after the other, so that two replacements of one slot stack.
            for replacement in record.replacements:
                entry = journal.prepare(replacement)
                written.append(entry)
                entry.write()
        except BaseException as error:
            for entry in reversed(written):
                entry.restore()
            if not isinstance(error, Exception):
                raise
            if isinstance(error, journal.Missing):
                return self._set(record, State.DRIFTED, str(error))
            self._logger.debug("%s failed", record.patch.name, exc_info=True)
            return self._set(record, State.FAILED, f"{type(error).__name__}: {error}")
        record.entries, record.state = written, State.APPLIED
        record.made += [weakref.ref(entry.replacement) for entry in written]

    def _ask(self, patch: Patch) -> Finding:
        try:
            return patch.find() if patch.find else broken()
        except (AttributeError, ImportError, TypeError) as error:
            # What it looks at is not there, or it calls what takes other arguments now.
            return drifted(f"its probe raised {type(error).__name__}: {error}")

    def _make_room(self, record: _Record) -> None:
        """Take back what is to be stacked on a patch, before it is applied."""
        self._lift(self._stack([record], map(id, _originals(record.replacements))))

    def _take_back(self, records: Sequence[_Record]) -> None:
        """Take patches back, and those that are stacked on them."""
        # Applied while somebody else had patched this one over, a lower one can call it, too.
        calling = [o for o in self._records.values() if any(map(o.calls, records))]
        self._lift(self._stack([*records, *calling], ()))

    def _lift(self, stack: Sequence[_Record]) -> None:
        """Take back what is on top, until nothing is, and arm it again.

        A patch that somebody else has patched over stays, and with it those that it calls.
        """
        while top := next(filter(self._is_on_top, reversed(stack)), None):
            for entry in reversed(top.entries):
                entry.restore()
            top.entries, top.state, top.unwanted = [], State.ARMED, False

    def _is_on_top(self, record: _Record) -> bool:
        if not record.entries or not record.in_place():
            return False
        return not any(other.calls(record) for other in self._others(record))

    def _stack(self, records: Sequence[_Record], functions: Iterable[int]) -> list[_Record]:
        """``records`` and what is stacked on them or on these functions, the lowest first."""
        everything = list(self._records.values())
        lowest = min(map(everything.index, records), default=0)
        shared = set(functions)
        stack: list[_Record] = []
        more = list(records)
        while more:
            stack += more
            shared.update(*(record.functions for record in more))
            above = (record for record in everything[lowest:] if record not in stack)
            more = [record for record in above if not shared.isdisjoint(record.functions)]
        return sorted(stack, key=everything.index)

    def _leave_reloaded(self) -> None:
        """Arm patches with a reloaded target again, and take them off their other targets: a
        probe has to see the original there, too."""
        records = [r for r in self._records.values() if r.state is State.APPLIED]
        left = []
        for record in records:
            pairs = list(zip(record.replacements, record.entries, strict=True))
            kept = [entry for each, entry in pairs if not journal.reloaded(each, record.entries)]
            if len(kept) < len(pairs):
                record.former += [entry for entry in record.entries if entry not in kept]
                record.entries = kept
                left.append(record)
        self._take_back(left)
        for record in left:
            record.former += record.entries
            record.entries, record.state = [], State.ARMED

    def _changed(self, record: _Record) -> str:
        names = ", ".join(map(str, record.changed(self._records.values())))
        return f"somebody else changed {names} afterwards" if names else ""

    def _obstacle(self, record: _Record) -> str:
        """Why a patch cannot be taken back."""
        callers = [other for other in self._others(record) if other.calls(record)]
        stay = [other.patch.name for other in callers if self._obstacle(other)]
        called = f"{', '.join(stay)} calls it and cannot be taken back" if stay else ""
        return self._changed(record) or called

    def _others(self, record: _Record) -> list[_Record]:
        return [other for other in self._records.values() if other is not record]

    def _set(self, record: _Record, state: State, reason: str) -> None:
        record.state, record.reason = state, reason
        said = f"{state} ({reason})" if reason else str(state)
        if said == record.said:
            return
        record.said = said
        if state in (State.DRIFTED, State.FAILED):
            if self._switches.strict:
                self._failures.append(f"{record.patch.name} {state}: {reason}")
            else:
                self._warn(record, f"{state}: {reason}; stepping aside")
        else:
            level = logging.INFO if state is State.APPLIED else logging.DEBUG
            self._logger.log(level, "%s: %s", record.patch.name, said)

    def _warn(self, record: _Record, text: str) -> None:
        if (record.patch.name, text) not in self._warned:
            self._warned.add((record.patch.name, text))
            self._logger.warning("%s: %s", record.patch.name, text)

    # -- imports --------------------------------------------------------------------------------

    def _hook(self, name: str) -> None:
        """Apply waiting patches as soon as module ``name`` is imported."""
        if name in self._hooked:
            return
        self._hooked.add(name)
        registering: int | None = threading.get_ident()

        def imported(module: object) -> None:
            # wrapt calls at once, from within the registration, where the module is in
            # sys.modules: perhaps in the middle of its import, with half its names.
            if registering != threading.get_ident():
                self._complete[name] = sys.modules.get(name)
            self._after_import()

        wrapt.register_post_import_hook(imported, name)
        registering = None
        if sys.modules.get(name) is not None and not self._is_imported(name):
            # Another thread is importing it: wait for that.  (In the middle of our own thread's
            # import this returns at once, and the patch stays armed until the next occasion.)
            with suppress(Exception):
                importlib.import_module(name)
            self._after_import()

    def _after_import(self) -> None:
        """Runs inside the user's import, which an exception would break."""
        try:
            self._stale = True
            self._settle(_PATIENCE)
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
        return not initializing or self._complete.get(name) is module

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
        return [record for name, record in self._records.items() if name in names or not names]

    def _describe(self, record: _Record) -> PatchStatus:
        patch = record.patch
        changed, untested = self._changed(record), ""
        if record.unwanted and not changed:
            changed = self._obstacle(record)
        if record.state in (State.ARMED, State.APPLIED, State.FIXED, State.DRIFTED):
            later = gate.later(record.versions, self._newest)
            untested = f"untested version: {', '.join(later)}" if later else ""
        reason = "; ".join(filter(None, (record.reason, changed, untested)))
        return PatchStatus(patch.name, record.state, reason, patch.symptom, record.versions)

    def _after_fork(self, child: bool = False) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # the wait for it took too long: another thread has it
            if child:
                self._lock, self._busy = threading.RLock(), False


def _originals(replacements: Iterable[Replacement]) -> list[Any]:
    """The functions that are to be replaced, as far as they are there."""
    functions = []
    for replacement in replacements:
        with suppress(Exception):  # is met, and told, where the patch is applied
            functions.append(journal.resolve(replacement).function)
    return functions
