"""Environment variables: all patches off, a group, one patch or all others; strict errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache

from .errors import suggestion
from .patch import FAST_MEANS

_OFF = ("0", "off", "false", "no")
_ON = ("1", "on", "true", "yes")
_ONLY = "only:"
_FORCE = "force"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Switches:
    """The switches, read from the environment once, at import."""

    prefix: str
    everything: bool = True
    strict: bool = False
    #: the patches that are off, each with the variable that says so, and its value
    off: Mapping[str, str] = field(default_factory=dict)
    #: the patches that variables ask for
    asked: Collection[str] = ()
    #: the patches to apply outside the version gate, too; the probe still decides
    forced: Collection[str] = ()
    #: what is wrong with the names after ``only:``
    mistakes: Sequence[str] = ()
    #: the variables that were read, with their values
    seen: Mapping[str, str] = field(default_factory=dict)
    #: the variables that have an effect, each with the patches that it is for
    names: Mapping[str, Iterable[str]] = field(default_factory=dict)
    #: former names of patches, and the present ones
    former: Mapping[str, str] = field(default_factory=dict)
    #: reads the same variables with further patches
    again: Callable[[Mapping[str, Iterable[str]]], Switches] | None = None

    def knowing(self, patches: Mapping[str, Iterable[str]]) -> Switches:
        """These switches as they are with further patches, each with those that it requires."""
        return self.again(patches) if self.again else self

    def renamed(self, name: str) -> str:
        """The present name of a patch; says so if it is another one."""
        if name in self.former:
            _say_renamed(name, self.former[name])
        return self.former.get(name, name)

    def late(self, off: Collection[str]) -> list[str]:
        """What to do about variables that were changed after they were read.

        ``off`` are the patches that are off now.  A change that agrees with them is not named.
        """
        now, module, notes = _of(self.prefix, os.environ), self.prefix.lower(), []
        for variable in sorted({*self.seen, *now} & {*self.names}):
            before, value = (each.get(variable, "").strip().lower() for each in (self.seen, now))
            patches, call = {*self.names[variable]}, "restart the process"
            if before == value:
                continue
            if patches and {before, value} <= {*_OFF, *_ON, ""}:
                if patches <= {*off} if value in _OFF else patches.isdisjoint(off):
                    continue
                if value in _OFF or patches.isdisjoint(self.off):
                    does = "uninstall" if value in _OFF else "install"
                    name = variable.removeprefix(self.prefix).removeprefix("_").lower()
                    quoted = f'"{name}"' if name else ""
                    call = f"call {module}.{does}({quoted}) now"
            notes.append(
                f"{variable} was changed after the import of {module}, which reads it once, so "
                f"the change has no effect: {call}"
            )
        return notes

    def offer(self) -> str:
        """Why some patches are not applied, and how to ask for them."""
        call = f'call {self.prefix.lower()}.install("fast")'
        return f"{FAST_MEANS}: to have them, set {self.prefix}_FAST=1, or {call}"

    def undo(self, reasons: Iterable[str]) -> str:
        """How to have the patches again that are off for these reasons."""
        if variables := dict.fromkeys(why.partition("=")[0] for why in reasons if "=" in why):
            return f"to have the patches again, unset {', '.join(variables)} and restart"
        return f"to have the patches again, call {self.prefix.lower()}.install()"


def read(
    prefix: str,
    patches: Mapping[str, Iterable[str]],
    logger: logging.Logger,
    environ: Mapping[str, str] | None = None,
    groups: Mapping[str, Iterable[str]] | None = None,
    asking: Mapping[str, Iterable[str]] | None = None,
    former: Mapping[str, str] | None = None,
) -> Switches:
    """Read ``PREFIX``, ``PREFIX_STRICT`` and ``PREFIX_<NAME>``; warn about other variables.

    ``PREFIX=only:A,B`` switches all patches off but A and B, and those that they require.  A
    variable of a patch takes precedence over one of a group, and over ``only``.

    Args:
        patches: the names of all patches, each with those that it requires.
        groups: more names for ``PREFIX_<NAME>`` and ``only``, each for several patches.
        asking: the patches that each of these names asks for; all of them without it.
        former: names that patches had before, and their present ones.  A variable with a former
            name switches the whole patch; if it and another variable of the patch disagree, the
            patch is off.
    """
    environ = os.environ if environ is None else environ
    groups = {} if groups is None else groups
    asking = groups if asking is None else asking
    former = {} if former is None else former
    if clash := former.keys() & patches.keys():
        raise ValueError(f"former names of patches are names of others: {', '.join(clash)}")
    names = {f"{prefix}_{name.upper()}": name for name in (*patches, *groups)}
    names |= {f"{prefix}_{name.upper()}": former[name] for name in former}
    strict_name = f"{prefix}_STRICT"
    everything, strict = True, False
    off: dict[str, str] = {}
    own: dict[str, tuple[str, str]] = {}  # the patches' own variables, and their values
    mistakes: list[str] = []
    asks: list[str] = []
    for variable in sorted(environ):
        value = environ[variable].strip().lower()
        if variable == prefix and value.startswith(_ONLY):
            given = [each.strip() for each in value.removeprefix(_ONLY).split(",") if each.strip()]
            for each in former.keys() & {*given}:
                _say_renamed(each, former[each])
            named = [former.get(each, each) for each in given]
            only = _only(named, f"{prefix}={value}", patches, groups, mistakes)
            for mistake in mistakes:
                logger.warning("%s", mistake)
            asks += named
            off |= dict.fromkeys(patches.keys() - only, f"{prefix}={value}")
        elif variable == prefix:
            everything = _boolean(variable, value, True, logger, extra=(f"{_ONLY}NAME,NAME",))
        elif variable == strict_name:
            strict = _boolean(variable, value, False, logger)
        elif names.get(variable) in groups:
            if not _boolean(variable, value, True, logger):
                off |= dict.fromkeys(groups[names[variable]], f"{variable}=0")
            elif value in _ON:
                asks.append(names[variable])
        elif variable in names:
            if value in (*_OFF, *_ON, _FORCE):
                name = names[variable]
                if variable != f"{prefix}_{name.upper()}":
                    _say_renamed(variable, f"{prefix}_{name.upper()}")
                if name not in own or value in _OFF or own[name][1] in _ON:
                    own[name] = variable, value
                if value not in _OFF:
                    asks.append(names[variable])
            else:
                _boolean(variable, value, True, logger, extra=(_FORCE,))
        elif hint := _hint(variable, prefix, (prefix, strict_name, *names)):
            logger.warning("unknown environment variable %s has no effect: %s", variable, hint)
    off = {name: why for name, why in off.items() if name not in own}
    off |= {name: f"{variable}=0" for name, (variable, value) in own.items() if value in _OFF}
    forced = [name for name, (_, value) in own.items() if value == _FORCE]
    known: dict[str, Iterable[str]] = {prefix: [*patches], strict_name: ()}
    known |= {variable: groups.get(name, (name,)) for variable, name in names.items()}
    seen, (asked, _) = _of(prefix, environ), _with_required(asks, patches, asking)

    def again(more: Mapping[str, Iterable[str]]) -> Switches:
        quiet = logging.Logger(prefix)  # what is wrong was said
        quiet.addHandler(logging.NullHandler())
        return read(prefix, {**patches, **more}, quiet, seen, groups, asking, former)

    return Switches(
        prefix, everything, strict, off, asked, forced, mistakes, seen, known, former, again
    )


@cache
def _say_renamed(former: str, name: str) -> None:
    _logger.warning("%s is now part of %s, and acts on all of it", former, name)


def _of(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with this prefix."""
    return {name: value for name, value in environ.items() if name.startswith(prefix)}


def _hint(variable: str, prefix: str, names: Sequence[str]) -> str:
    """What was probably meant by a variable that is not one of ours; "" if it is another's.

    Windows upper-cases the names of variables; elsewhere a lower-case name is a typo.
    """
    plain = {name.replace("_", ""): name for name in names}
    if meant := plain.get(variable.upper().replace("_", "")):
        return f"write {meant}"
    if not variable.upper().startswith(f"{prefix}_"):
        return ""
    ends = {name.removeprefix(f"{prefix}_"): name for name in names}
    if near := get_close_matches(variable.upper().removeprefix(f"{prefix}_"), ends, n=1):
        return f"did you mean {ends[near[0]]}?"
    return f"{prefix}=0 switches all patches off, {prefix}_PATCH=0 the one of that name"


def _only(
    names: Sequence[str],
    setting: str,
    patches: Mapping[str, Iterable[str]],
    groups: Mapping[str, Iterable[str]],
    mistakes: list[str],
) -> set[str]:
    """The patches that ``only:`` names, and those that they require; adds what is wrong."""
    found, strange = _with_required(names, patches, groups)
    known = [*patches, *groups]
    unknown = [f"no patch is called {name}{suggestion(name, known)}" for name in strange]
    if not found and not unknown:
        unknown.append(f"no patch is named after {_ONLY}")
    if unknown:
        end = "" if found else ", so all patches are off"
        mistakes.append(f"{setting}: {'; '.join(unknown)}{end}")
    return found


def _with_required(
    names: Iterable[str], patches: Mapping[str, Iterable[str]], groups: Mapping[str, Iterable[str]]
) -> tuple[set[str], list[str]]:
    """The named patches and those that they require, and the names that no patch or group has."""
    found: set[str] = set()
    strange: list[str] = []
    wanted = [*names]
    while wanted:
        name = wanted.pop()
        if name in groups:
            wanted += groups[name]
        elif name not in patches:
            strange.append(name)
        elif name not in found:
            found.add(name)
            wanted += patches[name]
    return found, strange


def _boolean(
    variable: str, value: str, default: bool, logger: logging.Logger, extra: tuple[str, ...] = ()
) -> bool:
    if value in _ON:
        return True
    if value in _OFF:
        return False
    if value:
        logger.warning(
            "%s=%r is not a valid value and has no effect; valid values: %s",
            variable, value, ", ".join((*_OFF, *_ON, *extra)),
        )  # fmt: skip
    return default
