"""The engine: arms patches, applies them when their targets are there, takes them back."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from ..errors import PatchError, suggestion
from . import gate
from .gate import Outcome
from .imports import Imports
from .patch import Finding, Patch, Verdict, broken, drifted
from .random_numbers import same_random_numbers
from .references import count_held, holders
from .slots import Mismatch
from .stack import Layer, Stack, originals
from .status import PatchStatus, State, Status
from .switches import Switch, Switches

#: Seconds that an import, or a fork, waits for another thread's use of the engine.  It may not
#: wait for ever: that thread may be waiting for the lock of a module that this one is importing.
_PATIENCE = 5.0

#: What a required patch may be: its bug is gone.
_GONE = (State.APPLIED, State.UNAFFECTED, State.FIXED, State.NOT_INSTALLED)
#: What it may not be.  While it is neither, it is waited for.
_THERE = (State.DISABLED, State.BLOCKED, State.DRIFTED, State.FAILED)

#: The engine of each prefix.  Here it outlives this package's being dropped from sys.modules; the
#: engine of the next import takes over from it.
_ENGINES: dict[str, Engine] = vars(sys).setdefault("_version_gated_patch_engines", {})


@dataclass(eq=False)
class _Record:
    """What the engine knows of one patch."""

    layer: Layer
    state: State = State.DISABLED
    reason: str = "not installed yet"
    #: whether it was to be taken back, and could not
    unwanted: bool = False
    #: how many references there were to it when it was taken back
    kept: int = 0
    said: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)

    @property
    def patch(self) -> Patch:
        return self.layer.patch


class Engine:
    """Arms, applies and takes back a fixed set of patches in this process.

    Patches of one slot are stacked in the order in which they are given here, in whatever order
    they are applied.  ``floors`` and ``newest`` hold the oldest supported and the newest measured
    version of each distribution: no patch is for an older one, and the status names a later one.
    """

    def __init__(
        self,
        patches: Iterable[Patch],
        switches: Switches,
        logger: logging.Logger,
        floors: Mapping[str, str] | None = None,
        newest: Mapping[str, str] | None = None,
    ) -> None:
        self._records = {patch.name: _Record(Layer(patch)) for patch in patches}
        self._required_first = _required_first(self._records)
        self._stack = Stack(record.layer for record in self._records.values())
        self._switches = switches
        self._logger = logger
        self._floors, self._newest = floors or {}, newest or {}
        self._imports = Imports(self._after_import)
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
                self._imports.watch(module)

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
                self._imports.watch(module)
        return self.status()

    def uninstall(self, *names: str) -> Status:
        """Take the named patches back (all without names), to the last descriptor."""
        records = self._select(names)
        with self._lock:
            self._decide()
            self._take_back(records)
            for record in records:
                if record.layer.entries:
                    record.unwanted = True
                    self._warn(record, f"not taken back: {self._stack.obstacle(record.layer)}")
                elif record.state is not State.DISABLED:
                    self._set(record, State.DISABLED, "uninstalled")
            self._block()
            for record in reversed(self._records.values()):
                if record.state in (State.DISABLED, State.BLOCKED):
                    record.layer.take_off_former()
            self._stale = True
            self._settle()
            self._count_kept()
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
            found = gate.evaluate(record.patch.affects, self._floors)
            record.versions = found.versions
            record.layer.replacements  # noqa: B018  (reads the gates of the single ones)
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
        applied = [r.layer for r in self._records.values() if r.state is State.APPLIED]
        self._rearm(self._stack.leave_reloaded(applied))
        self._block()
        armed = [record for record in self._records.values() if record.state is State.ARMED]
        # Only where we came late: what happens between two imports of the libraries themselves
        # is not worth a scan of all objects in each.
        late = [
            replacement
            for record in armed
            if self._can_be_applied(record)
            for replacement in record.layer.replacements
            if not self._imports.watches(replacement.module)
        ]
        before = holders(originals(late))
        self._apply_all()
        while unfounded := self._unfounded():
            self._take_back(unfounded)
            self._block()
            self._apply_all()
            self._count_kept()
        for record in armed:
            if record.state is State.APPLIED:
                entries = record.layer.entries
                held = count_held(before, {id(e.original): e.keepers() for e in entries})
                text = f"{held} reference(s) taken before the patch keep the original"
                self._set(record, State.APPLIED, text if held else "")
            elif record.state is State.ARMED:
                self._set(record, State.ARMED, self._waits_for(record))

    def _can_be_applied(self, record: _Record) -> bool:
        """Now, or as soon as what it requires is."""
        if record.state is not State.ARMED or self._waiting(record):
            return record.state in _GONE
        return all(map(self._can_be_applied, self._required(record)))

    def _apply_all(self) -> None:
        """Apply all that wait for nothing, until what they required of each other is applied."""
        waiting = True
        while waiting:
            waiting = False
            for record in self._records.values():
                if record.state is State.ARMED and not self._waits_for(record):
                    self._apply(record)
                    waiting = True
            self._block()

    def _apply(self, record: _Record) -> None:
        """Ask the probe, then put all replacements in place, or none."""
        try:
            self._rearm(self._stack.make_room(record.layer))
            found = self._ask(record.patch)
            if found.verdict is not Verdict.BROKEN:
                state = State.FIXED if found.verdict is Verdict.FIXED else State.DRIFTED
                return self._set(record, state, found.reason)
            record.layer.put()
        except Mismatch as error:
            return self._set(record, State.DRIFTED, str(error))
        except Exception as error:
            self._logger.debug("%s failed", record.patch.name, exc_info=True)
            return self._set(record, State.FAILED, f"{type(error).__name__}: {error}")
        record.state = State.APPLIED

    def _ask(self, patch: Patch) -> Finding:
        try:
            with same_random_numbers():
                return patch.probe_function() if patch.probe_function else broken()
        except (AttributeError, ImportError, TypeError) as error:
            # What it looks at is not there, or it calls what takes other arguments now.
            return drifted(f"its probe raised {type(error).__name__}: {error}")

    def _take_back(self, records: Iterable[_Record]) -> None:
        self._rearm(self._stack.take_off(record.layer for record in records))

    def _count_kept(self) -> None:
        for record in self._records.values():
            if record.state in (State.DISABLED, State.BLOCKED) and record.layer.made:
                record.kept = record.layer.references()

    def _rearm(self, layers: Iterable[Layer]) -> None:
        """What was taken off is armed again, unless more is said of it afterwards."""
        for layer in layers:
            record = self._records[layer.patch.name]
            record.state, record.unwanted = State.ARMED, False

    # -- what patches require of each other ---------------------------------------------------

    def _required(self, record: _Record) -> list[_Record]:
        return [self._records[name] for name in record.patch.requires]

    def _block(self) -> None:
        """Block what requires a patch that will not be applied; arm it where that is over."""
        for record in self._required_first:
            if record.state in (State.ARMED, State.BLOCKED):
                if needs := self._needs(record, _THERE):
                    self._set(record, State.BLOCKED, needs)
                elif record.state is State.BLOCKED:
                    self._set(record, State.ARMED, "")

    def _unfounded(self) -> list[_Record]:
        """What is applied and can come off, without a patch that it requires."""
        records = [r for r in self._records.values() if r.layer.entries]
        unfounded = [r for r in records if any(o.state not in _GONE for o in self._required(r))]
        return [record for record in unfounded if not self._stack.obstacle(record.layer)]

    def _needs(self, record: _Record, states: Sequence[State]) -> str:
        """The required patches in one of these states, for people."""
        found = [other for other in self._required(record) if other.state in states]
        return "; ".join(f"needs {o.patch.name}, which is {_state_of(o)}" for o in found)

    def _waits_for(self, record: _Record) -> str:
        modules = ", ".join(self._waiting(record))
        imports = f"waits for the import of {modules}" if modules else ""
        return "; ".join(filter(None, (imports, self._needs(record, (State.ARMED,)))))

    # -- what is said ---------------------------------------------------------------------------

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

    def _after_import(self) -> None:
        """Runs inside the user's import, which an exception would break."""
        try:
            self._stale = True
            self._settle(_PATIENCE)
        except PatchError:
            raise
        except Exception:
            self._logger.warning("internal error after an import", exc_info=True)

    def _waiting(self, record: _Record) -> list[str]:
        if record.state is not State.ARMED:
            return []
        modules = dict.fromkeys(replacement.module for replacement in record.layer.replacements)
        return [module for module in modules if not self._imports.is_imported(module)]

    # -- bookkeeping ----------------------------------------------------------------------------

    def _select(self, names: Sequence[str]) -> list[_Record]:
        for name in names:
            if name not in self._records:
                hint = suggestion(name, self._records)
                raise ValueError(f"no patch is named {name!r}{hint}: status() lists all")
        return [record for name, record in self._records.items() if name in names or not names]

    def _describe(self, record: _Record) -> PatchStatus:
        patch = record.patch
        layer, stays, untested = record.layer, "", ""
        if record.unwanted or self._stack.changed(layer):
            stays = self._stack.obstacle(layer)
        needs = self._needs(record, _THERE) if layer.entries else ""
        if record.kept and record.state in (State.DISABLED, State.BLOCKED):
            stays = f"{record.kept} reference(s) taken before keep the patch"
        if record.state in (State.ARMED, State.APPLIED, State.FIXED, State.DRIFTED):
            later = gate.later(record.versions, self._newest)
            untested = f"untested version: {', '.join(later)}" if later else ""
        reason = "; ".join(filter(None, (record.reason, needs, stays, untested)))
        replaced = tuple(map(str, layer.replacements)) if layer.entries else ()
        return PatchStatus(
            patch.name, record.state, reason, patch.symptom, record.versions, replaced
        )

    def _after_fork(self, child: bool = False) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # the wait for it took too long: another thread has it
            if child:
                self._lock, self._busy = threading.RLock(), False


def _required_first(records: Mapping[str, _Record]) -> list[_Record]:
    """In an order in which each comes after what it requires."""
    for record in records.values():
        if unknown := set(record.patch.requires) - records.keys():
            names = ", ".join(sorted(unknown))
            raise ValueError(f"{record.patch.name} requires {names}, and there is no such patch")
    graph = {name: record.patch.requires for name, record in records.items()}
    try:
        return [records[name] for name in TopologicalSorter(graph).static_order()]
    except CycleError as error:
        circle = ", ".join(error.args[1])
        raise ValueError(f"patches require each other in a circle: {circle}") from None


def _state_of(record: _Record) -> str:
    """The state, and who switched it off."""
    if record.state is not State.DISABLED:
        return str(record.state)
    by = "uninstall()" if record.reason == "uninstalled" else record.reason
    return f"disabled by {by}"
