"""The engine: arms patches, applies them when their targets are imported, and undoes them.

This is one file because all of it changes the states of the same records, under one lock.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from typing import Any

from . import gate
from .errors import PatchError, suggestion
from .fingerprint import is_measured
from .gate import Outcome
from .imports import Imports
from .overview import Overview
from .patch import Finding, Kind, Patch, Verdict, broken, drifted
from .record import BUG_GONE, BUG_REMAINS, Record, required_first, state_of, whole
from .references import count, holders
from .slots import Mismatch, look_up
from .stack import Layer, Stack, originals
from .status import About, State, Status
from .switches import Switches

#: Seconds that an import or a fork waits while another thread uses the engine.  Waiting longer
#: could deadlock: that thread may wait for the lock of a module that this thread imports.
_PATIENCE = 5.0

#: The engine of each prefix.  It is stored in ``sys``, to survive when this package is removed from
#: sys.modules.  The engine of the next import then replaces it.
_ENGINES: dict[str, Engine] = vars(sys).setdefault("_version_gated_patch_engines", {})


class Engine:
    """Arms, applies and undoes patches in this process.

    If several patches replace the same attribute, they are around it in the order of ``patches``,
    whatever the order in which they are applied.  ``floors`` holds the oldest supported version of
    each library, whose distribution and module have one name: no patch is applied to an older one.
    ``newest`` holds the newest measured version: the status names a later one.
    """

    def __init__(
        self,
        patches: Iterable[Patch],
        switches: Switches,
        logger: logging.Logger,
        floors: Mapping[str, str] | None = None,
        newest: Mapping[str, str] | None = None,
        about: About | None = None,
    ) -> None:
        self._switches = switches
        #: by patch: one for each of its parts
        self._parts: dict[str, list[Record]] = {}
        self._records: list[Record] = []
        self._stack = Stack()
        self._add(patches)
        self._logger = logger
        self._floors = floors or {}
        self._about = about or About()
        self._overview = Overview(self._stack, self._floors, newest or {}, self._about)
        #: libraries whose import raised, and the error
        self._broken: dict[str, str] = {}
        self._imports = Imports(self._after_import)
        self._warned: set[tuple[str, str]] = set()
        self._failures: list[str] = []
        self._lock = threading.RLock()
        self._busy = False
        self._stale = False
        self._undecided = False
        self._removed = False  # whether a count of references has to follow
        if hasattr(os, "register_at_fork") and not _ENGINES:
            # A child must not inherit a lock that no thread of it holds, nor a half-applied patch.
            os.register_at_fork(
                before=lambda: [e._lock.acquire(timeout=_PATIENCE) for e in [*_ENGINES.values()]],
                after_in_parent=_after_fork,
                after_in_child=lambda: _after_fork(child=True),
            )
        predecessor = _ENGINES.get(switches.prefix)
        _ENGINES[switches.prefix] = self
        if predecessor is not None:
            predecessor.retire()

    def _add(self, patches: Iterable[Patch]) -> list[Record]:
        """Make the records of patches.

        Raises:
            ValueError: a name is taken, or a required patch is unknown.
        """
        parts = dict(self._parts)
        for patch in patches:
            if patch.name in parts:
                raise ValueError(f"two patches are named {patch.name}")
            layers: list[Layer] = []
            layers += [Layer(patch, unit, layers) for unit in patch.units]
            parts[patch.name] = [Record(layer, self._is_asked(patch)) for layer in layers]
        for name, records in parts.items():
            if unknown := {*records[0].patch.requires} - {*parts}:
                raise ValueError(f"{name} requires unknown patches: {', '.join(sorted(unknown))}")
        self._required_first = required_first(parts)
        added = [each for name in parts if name not in self._parts for each in parts[name]]
        self._parts = parts
        self._records += added
        self._stack.layers += [record.layer for record in added]
        return added

    # -- public methods -----------------------------------------------------------------------

    def add(self, *patches: Patch) -> Status:
        """Add patches, and arm or apply them.  They are around those that are there already.

        Variables of the environment that are named after them count as if they had been known at
        the start.

        Raises:
            ValueError: a patch of that name is there, or a required patch is unknown.

        Example:
            >>> engine.add(PATCH)["quiet_names"].state
            <State.APPLIED: 'applied'>
        """
        with self._lock:
            self._decide()
            before = self._switches
            self._switches = before.knowing({patch.name: patch.requires for patch in patches})
            try:
                added = self._add(patches)
            except ValueError:
                self._switches = before
                raise
        return self._install(added, late=True)

    def start(self) -> None:
        """Arm all patches at the least cost.

        If one of their libraries is imported already, the version gates are evaluated at once.
        Else they are evaluated when the first target is imported, or a method needs the states.
        """
        modules = {r.module for record in self._records for r in record.patch.targets}
        if any(module.partition(".")[0] in sys.modules for module in modules):
            for record in self._records:
                record.outside = True
            self._install(self._records)
        else:
            self._undecided = True
            for module in sorted(modules):
                self._imports.watch(module)

    def install(self, *names: str) -> Status:
        """Arm or apply the named patches, or all if no name is given.  Idempotent.

        A patch of the kind ``FAST`` has to be named, or required by a named one.
        """
        records = self._select(names)
        for record in records:  # which grows
            record.outside = True
            if names:
                record.asked = True
                others = itertools.chain(*self._required(record))
                records += [other for other in others if not other.asked]
        return self._install(records, late=True)

    def _install(self, records: Sequence[Record], *, late: bool = False) -> Status:
        """Arm or apply patches; if ``late``, other code may have what they replace already."""
        with self._lock:
            self._decide()
            for record in records:
                record.unwanted = False
                if record.state is not State.APPLIED:
                    self._arm(record)
                    is_armed = record.state is State.ARMED
                    record.is_late = late and is_armed and not self._waiting(record)
        self._settle()
        for record in records:
            for module in self._waiting(record):
                self._imports.watch(module)
        return self.status()

    def uninstall(self, *names: str) -> Status:
        """Undo the named patches, or all if no name is given; restore the original descriptors."""
        records = self._select(names)
        for record in records:
            record.outside, record.asked = False, self._is_asked(record.patch)
        return self._uninstall(records)

    def _uninstall(self, records: Sequence[Record]) -> Status:
        with self._lock:
            self._decide()
            self._take_off(records)
            for record in records:
                if record.layer.entries:
                    record.unwanted = True
                    self._warn(record, f"not uninstalled: {self._stack.obstacle(record.layer)}")
                elif not record.asked:
                    self._arm(record)
                elif record.state is not State.DISABLED:
                    self._set(record, State.DISABLED, "uninstall()")
            self._block()
            self._stale = self._removed = True
            self._settle()
        return self.status()

    def status(self) -> Status:
        """The states of all patches, after applying those that can be applied by now."""
        self._stale = True
        self._settle()
        with self._lock:
            parts = self._parts.values()
            entries = [self._overview.describe(records, self._needs) for records in parts]
            return self._overview.status(entries, self._broken, self._switches)

    def import_targets(self) -> Status:
        """Import the modules that armed patches wait for, so that their states are final."""
        self.status()
        libraries = dict.fromkeys((*self._about.required, *self._floors))
        for library in libraries:
            try:
                gate.installed_version(library)
                importlib.import_module(library)
            except PackageNotFoundError:
                pass
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                # Neither the error of another library, nor one that is not installed.
                others = libraries.keys() - {library}
                if text not in self._broken.values() and _missing(error) not in others:
                    self._broken[library] = text
        for record in [*self._records]:
            for module in self._waiting(record):
                if module.partition(".")[0] in self._broken:
                    break
                try:
                    importlib.import_module(module)
                except Exception as error:  # the user should learn of a broken library, too
                    if self._broken:  # that is the reason
                        break
                    with self._lock:
                        self._set(record, *_why_not_imported(module, error, libraries))
                    break
        return self.status()

    @contextmanager
    def disabled(self, names: Sequence[str]) -> Iterator[Status]:
        """Switch patches off inside a ``with`` block; restore their states afterwards.

        Blocks may overlap in several threads: the last one to end restores.
        """
        records = self._select(names)
        self.status()
        with self._lock:
            for record in records:
                if not record.blocks:
                    record.outside = record.state is not State.DISABLED
                record.blocks += 1
        try:
            yield self._follow_blocks(records)
        finally:
            with self._lock:
                for record in records:
                    record.blocks -= 1
            self._follow_blocks(records)

    def _follow_blocks(self, records: Sequence[Record]) -> Status:
        changing: dict[bool, list[Record]] = {True: [], False: []}
        for record in records:
            on = record.outside and not record.blocks
            if on is (record.state is State.DISABLED or record.unwanted):
                changing[on].append(record)
        if changing[False]:
            self._uninstall(changing[False])
        return self._install(changing[True]) if changing[True] else self.status()

    def retire(self) -> None:
        """Undo all patches, and handle none from now on."""
        self.uninstall()
        self._records, self._parts = [], {}

    # -- states of a patch --------------------------------------------------------------------

    def _decide(self) -> None:
        """Evaluate the version gates, if ``start`` postponed that."""
        if self._undecided:
            self._undecided = False
            for name, text in gate.too_old(self._floors).items():
                self._logger.warning("%s: %s", text, gate.upgrade({name: self._floors[name]}))
            for record in self._records:
                self._arm(record)

    def _arm(self, record: Record) -> None:
        name = record.patch.name
        try:
            affects = record.patch.gate_of(record.layer.unit)
            evaluation = gate.evaluate(affects, self._floors)
            record.versions = evaluation.versions
            record.modules = dict.fromkeys(each.module for each in record.layer.replacements)
        except ValueError as error:
            return self._set(record, State.FAILED, f"a version gate is invalid: {error}")
        if not self._switches.everything:
            return self._set(record, State.DISABLED, f"{self._switches.prefix}=0")
        if why := self._switches.off.get(name):
            return self._set(record, State.DISABLED, why)
        if evaluation.outcome is Outcome.MISSING:
            return self._set(record, State.NOT_INSTALLED, evaluation.reason)
        if name not in self._switches.forced:
            if evaluation.outcome is Outcome.TOO_OLD:
                return self._set(record, State.TOO_OLD, evaluation.reason)
            if evaluation.outcome is Outcome.OUTSIDE:
                return self._set(record, State.UNAFFECTED, evaluation.reason)
        if not record.asked:
            return self._set(record, State.OPTIONAL, self._switches.offer())
        record.logged = ""
        self._stale = True
        return self._set(record, State.ARMED, "")

    def _settle(self, timeout: float = -1) -> None:
        """Apply all patches that can be applied; repeat if modules were imported meanwhile.

        With a timeout, this may leave the work to the thread that holds the lock.
        """
        while self._stale and self._lock.acquire(timeout=timeout):
            try:
                if self._busy:  # called by a probe or a factory, or by an import inside one
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
        self._block()
        armed = [record for record in self._records if record.state is State.ARMED]
        # A search for references at each import would cost too much.
        functions: list[Any] = []
        late: dict[Record, set[int]] = {}
        for record in filter(self._can_be_applied, armed):
            taken = self._taken(record)
            if record.is_late or [*map(sys.getrefcount, taken)] != record.then:
                functions += taken
                late[record] = {*map(id, taken)}
        taken = []
        if any(record.is_late for record in armed):
            gc.collect()  # what nobody can call any more holds no function
        before, keepers = holders(functions), self._stack.keepers() if functions else set()
        try:
            self._apply_all()
            while (unsupported := self._unsupported()) and self._take_off(unsupported):
                self._block()
                self._apply_all()
        finally:
            self._stack.settle()
        if self._removed:
            self._count_kept()
        keepers |= self._stack.keepers() if functions else set()
        found = count(before, keepers)
        for record in armed:
            if record.state is State.APPLIED:
                if late.get(record):
                    record.held = sum(found[each] for each in late[record])
                text = (
                    f"{record.held} reference(s) made before the patch still point to the original"
                )
                record.is_late = False
                self._set(record, State.APPLIED, text if record.held else "")
            elif record.state is State.ARMED:
                self._set(record, State.ARMED, self._waits_for(record))

    def _taken(self, record: Record) -> list[Any]:
        """The originals in modules that are older than the engine's watch, or than the request."""
        watches, places = self._imports.watches, record.layer.to_put
        return originals(each for each in places if record.is_late or not watches(each.module))

    def _can_be_applied(self, record: Record) -> bool:
        """Whether it can be applied now, or once the patches that it requires are applied."""
        if record.state is not State.ARMED or self._waiting(record):
            return record.state in BUG_GONE
        return all(any(map(self._can_be_applied, parts)) for parts in self._required(record))

    def _apply_all(self) -> None:
        """Apply the patches that wait for nothing, until no other one can be applied."""
        waiting = True
        while waiting:
            waiting = False
            for record in self._records:
                if record.state is State.ARMED and not self._waits_for(record):
                    self._apply(record)
                    waiting = True
            self._block()

    def _apply(self, record: Record) -> None:
        """Run the probe, then put all replacements in place, or none."""
        try:
            finding = self._run_probe(record)
            if finding.verdict is not Verdict.BROKEN:
                state = State.FIXED if finding.verdict is Verdict.FIXED else State.DRIFTED
                return self._set(record, state, finding.reason)
            for name in record.layer.names:
                look_up(name)
            _require_measured(record)
            self._stack.put(record.layer)
        except Mismatch as error:
            self._set(record, State.DRIFTED, str(error))
        except Exception as error:
            self._logger.debug("%s failed", record.name, exc_info=True)
            self._set(record, State.FAILED, f"{type(error).__name__}: {error}")
        else:
            record.state = State.APPLIED
        self._rearm(())

    def _run_probe(self, record: Record) -> Finding:
        probe = record.layer.unit.probe_function or record.patch.probe_function
        try:
            with _apart():
                return probe() if probe else broken()
        except (AttributeError, ImportError, TypeError) as error:
            # The code that it examines is gone, or takes other arguments now.
            return drifted(f"its probe raised {type(error).__name__}: {error}")
        except Exception:
            _require_measured(record)
            raise

    def _take_off(self, records: Iterable[Record]) -> bool:
        """Undo patches, and arm them.  The caller may set another state afterwards."""
        removed = self._stack.take_off([record.layer for record in records])
        self._removed = self._removed or bool(removed)
        self._rearm(removed)
        return bool(removed)

    def _rearm(self, removed: Sequence[Layer]) -> None:
        layers, self._stack.lost = {*removed, *self._stack.lost}, []
        for record in self._records if layers else ():
            if record.layer in layers and record.state is State.APPLIED:
                record.state, record.unwanted = State.ARMED, False

    def _count_kept(self) -> None:
        self._removed = False
        off = [r for r in self._records if not r.layer.entries and r.layer.made]
        functions = [function for record in off for function in record.layer.alive()]
        found = count(holders(functions))
        for record in off:
            record.kept = sum(found[id(function)] for function in record.layer.alive())
            record.then = [*map(sys.getrefcount, self._taken(record))]

    # -- what patches require of each other ---------------------------------------------------

    def _required(self, record: Record) -> list[list[Record]]:
        """The parts of each patch that it requires."""
        return [self._parts[name] for name in record.patch.requires]

    def _block(self) -> None:
        """Block patches that require one that cannot be applied; arm them once that changes."""
        for record in self._required_first:
            if record.state in (State.ARMED, State.BLOCKED):
                if needs := self._needs(record, BUG_REMAINS):
                    self._set(record, State.BLOCKED, needs)
                elif record.state is State.BLOCKED:
                    self._set(record, State.ARMED, "")

    def _unsupported(self) -> list[Record]:
        """Applied patches that can be undone, and lack a patch that they require."""
        records = [r for r in self._records if r.layer.entries]
        lacking = [r for r in records if self._needs(r, [*set(State) - {*BUG_GONE}])]
        return [record for record in lacking if not self._stack.obstacle(record.layer)]

    def _needs(self, record: Record, states: Sequence[State]) -> str:
        """Text about the required patches that are in one of these states."""
        parts = (parts for parts in self._required(record) if not _serves(parts))
        required = [other for other in map(whole, parts) if other.state in states]
        return "; ".join(f"needs {o.patch.name}, which is {state_of(o)}" for o in required)

    def _waits_for(self, record: Record) -> str:
        modules = ", ".join(self._waiting(record))
        imports = f"waits for the import of {modules}" if modules else ""
        return "; ".join(filter(None, (imports, self._needs(record, (State.ARMED,)))))

    # -- logging --------------------------------------------------------------------------------

    def _set(self, record: Record, state: State, reason: str) -> None:
        record.state, record.reason = state, reason
        text = f"{state} ({reason})" if reason else str(state)
        if text == record.logged:
            return
        record.logged = text
        if state in (State.DRIFTED, State.FAILED):
            if self._switches.strict:
                self._failures.append(f"{record.name} {state}: {reason}")
            else:
                self._warn(record, f"{state}: {reason}; the patch is not applied")
        else:
            level = logging.INFO if state is State.APPLIED else logging.DEBUG
            self._logger.log(level, "%s: %s", record.name, text)

    def _warn(self, record: Record, text: str) -> None:
        if (record.patch.name, text) not in self._warned:  # parts often have the same reason
            self._warned.add((record.patch.name, text))
            self._logger.warning("%s: %s", record.name, text)

    # -- imports --------------------------------------------------------------------------------

    def _after_import(self) -> None:
        """Settle the patches.  Errors would break the user's import: only strict mode raises."""
        try:
            self._stale = True
            self._settle(_PATIENCE)
        except PatchError:
            raise
        except Exception:
            self._logger.warning("internal error after an import", exc_info=True)

    def _waiting(self, record: Record) -> list[str]:
        if record.state is not State.ARMED:
            return []
        return [module for module in record.modules if not self._imports.is_imported(module)]

    # -- bookkeeping ----------------------------------------------------------------------------

    def _is_asked(self, patch: Patch) -> bool:
        """Whether a variable asks for the patch, or nobody has to."""
        return patch.kind is not Kind.FAST or patch.name in self._switches.asked

    def _select(self, names: Sequence[str]) -> list[Record]:
        known = {name: self._switches.renamed(name) for name in names}
        for name, meant in known.items():
            if meant not in self._parts:
                hint = suggestion(name, self._parts)
                raise ValueError(f"no patch is named {name!r}{hint}: status() lists all")
        return [r for r in self._records if r.patch.name in known.values() or not names]


def _require_measured(record: Record) -> None:
    for copied in itertools.filterfalse(is_measured, record.layer.copied):
        raise Mismatch(
            f"{copied} has other code than in the measured releases, or no source that can be read"
        )


@contextmanager
def _apart() -> Iterator[None]:
    """A context for a probe: the random numbers and the default device are the user's."""
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "random"):  # not while it is imported
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield
    else:
        yield


def _serves(parts: Sequence[Record]) -> bool:
    """Whether the bug is gone for one model, and the other parts wait for theirs."""
    states = {record.state for record in parts}
    return State.ARMED in states and not states - {State.ARMED, *BUG_GONE} and len(states) > 1


def _after_fork(child: bool = False) -> None:
    for engine in [*_ENGINES.values()]:
        try:
            engine._lock.release()
        except RuntimeError:  # acquiring it timed out: another thread holds it
            if child:
                engine._lock, engine._busy = threading.RLock(), False


def _why_not_imported(
    module: str, error: Exception, libraries: Collection[str]
) -> tuple[State, str]:
    """The state of a patch whose target cannot be imported, and the reason.

    Nobody can use a module that needs something which is not installed, so its bug does no harm.
    A module that is not of one of the engine's libraries may be misspelled.
    """
    missing = _missing(error)
    if missing and (missing in libraries or missing != module.partition(".")[0]):
        return State.UNAFFECTED, f"{module} needs {missing}, which is not installed"
    return State.FAILED, f"cannot import {module}: {error}"


def _missing(error: BaseException | None) -> str:
    """The library that the import of a module lacks, which may be its own; else ""."""
    while error is not None:
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        if name and "." not in name:
            return name
        error = error.__cause__ or error.__context__
    return ""
