"""The data of a patch: when it applies, and the functions that replace upstream's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .signatures import calling

Factory = Callable[[Callable[..., Any]], Callable[..., Any]]
_SLUG = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


class Kind(Enum):
    """What a patch achieves."""

    #: the result is now right
    FIX = "fix"
    #: the result is unchanged, and the user is warned
    WARNING = "warning"
    #: the result was right, and now takes less memory
    MEMORY = "memory"
    #: the result is the same bit for bit, and is now faster
    EXACT = "exact"
    #: the result is faster, but see ``FAST_MEANS``; only for those who ask for it
    FAST = "fast"

    @property
    def does(self) -> str:
        """What several patches of this kind do, for a count of them."""
        return _DOES[self]


#: What patches of the kind ``FAST`` do.  All other texts say the same.
FAST_MEANS = "round differently or run a step ahead"
_DOES = {
    Kind.FIX: "fix errors",
    Kind.WARNING: "warn",
    Kind.MEMORY: "save memory",
    Kind.EXACT: "save time",
    Kind.FAST: f"save time and {FAST_MEANS}",
}


class Verdict(Enum):
    """A probe's result on the real target."""

    BROKEN = "broken"
    FIXED = "fixed"
    DRIFTED = "drifted"


@dataclass(frozen=True)
class Finding:
    """A probe's verdict, and its reason as text for users."""

    verdict: Verdict
    reason: str = ""


def broken(reason: str = "") -> Finding:
    """The bug exists: apply the patch."""
    return Finding(Verdict.BROKEN, reason)


def fixed(reason: str) -> Finding:
    """The bug is gone: do not apply the patch."""
    return Finding(Verdict.FIXED, reason)


def drifted(reason: str) -> Finding:
    """The target is not as the patch expects: do not apply the patch, and warn."""
    return Finding(Verdict.DRIFTED, reason)


def fixed_if(gone: Any, reason: str) -> Finding:
    """``fixed(reason)`` if the bug is gone, else ``broken()``."""
    return fixed(reason) if gone else broken()


@dataclass(frozen=True)
class Place:
    """An attribute of a module, such as ``Class.method``."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass(frozen=True)
class Copied(Place):
    """A function that a patch copies; its fingerprints in the measured releases, with spaces."""

    fingerprints: str
    when: str | None = None


@dataclass(frozen=True)
class Replacement(Place):
    """One attribute to replace.

    ``factory`` gets the plain function behind the attribute (unwrapped from ``staticmethod`` or
    ``classmethod``; the getter of a ``property``) and returns a plain closure, decorated with
    ``functools.wraps``.  The engine puts the descriptor back around it.  Never return a wrapt
    proxy: torch.compile silently leaves it out of the graph.

    ``when`` is a PEP 508 requirement.  On versions that do not meet it, this target does not exist
    and is not replaced.

    ``variable`` is one of a closure, for a wrapper that compares itself with the attribute, or
    that objects keep.  If the function has it, its value is replaced, and the attribute stays.
    """

    factory: Factory
    when: str | None = None
    variable: str = ""


class _Replacing:
    """Registers replacements, and the probe for them."""

    name: str
    affects: Sequence[str]
    replacements: list[Replacement]
    copied: list[Copied]
    probe_function: Callable[[], Finding] | None

    def replaces(
        self, module: str, attribute: str, *, when: str | None = None, variable: str = ""
    ) -> Callable[[Factory], Factory]:
        """Register the decorated factory as the replacement of ``module.attribute``."""

        def register(factory: Factory) -> Factory:
            self.replacements.append(Replacement(module, attribute, factory, when, variable))
            return factory

        return register

    def around(
        self, module: str, attribute: str, *, when: str | None = None, variable: str = ""
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Have the decorated function called instead of ``module.attribute``.

        It gets the original, then the arguments of the call.
        """

        register = self.replaces(module, attribute, when=when, variable=variable)

        def called(function: Callable[..., Any]) -> Callable[..., Any]:
            register(calling(function))
            return function

        return called

    def copies(
        self, module: str, attribute: str, fingerprints: str, *, when: str | None = None
    ) -> None:
        """Say that the replacements copy this function's code.

        The patch drifts if the code has none of these fingerprints (``tools/fingerprints.py``).
        """
        self.copied.append(Copied(module, attribute, fingerprints, when))

    def probe(self, function: Callable[[], Finding]) -> Callable[[], Finding]:
        """Register the decorated function as the probe.

        It runs once all target modules are imported, during the user's import of the last one.
        So it must import nothing else.
        """
        self.probe_function = function
        return function


@dataclass(eq=False)
class Part(_Replacing):
    """What a patch replaces for one of several models, as soon as that model's module is imported.

    Args:
        name: what it is for, in texts.
        affects: requirements besides those of the patch.
    """

    name: str
    affects: Sequence[str] = ()
    replacements: list[Replacement] = field(default_factory=list, init=False)
    copied: list[Copied] = field(default_factory=list, init=False)
    probe_function: Callable[[], Finding] | None = field(default=None, init=False)


@dataclass(eq=False)
class Patch(_Replacing):
    """One bug, its gate and its fix.

    Args:
        name: slug; also the module's file name, the switch ``<PREFIX>_<NAME>``, the test id and
            the heading in the generated documentation.
        symptom: what the user sees, in one line; the text of the exception if there is one.
        affects: requirement strings over installed distributions, such as ``("a<2", "b")``.  The
            patch is for versions that meet all of them.  The engine adds the oldest supported
            version to a requirement without a lower bound.
        kind: what the patch achieves.
        differs: which results that were right it changes, and why; "" if none.
        note: what the list of affected releases does not show, such as a deliberate refusal.
        links: upstream issues and pull requests.
        unreported: why there are no links.
        requires: names of other patches.  This patch is right only if their bugs are gone, fixed
            by those patches or upstream.
        former: names that the patch had before.  They still name it.
    """

    name: str
    symptom: str
    affects: Sequence[str]
    kind: Kind = Kind.FIX
    differs: str = ""
    note: str = ""
    links: Sequence[str] = ()
    unreported: str = ""
    requires: Sequence[str] = ()
    former: Sequence[str] = ()
    #: If it has parts, these are put in place together with the first part.
    replacements: list[Replacement] = field(default_factory=list, init=False)
    copied: list[Copied] = field(default_factory=list, init=False)
    parts: list[Part] = field(default_factory=list, init=False)
    #: Names of the libraries that the replacements read when they are called.  The patch drifts if
    #: one is missing in what is imported when its probe runs.
    names: Sequence[str] = field(default=(), init=False)
    probe_function: Callable[[], Finding] | None = field(default=None, init=False)
    release: Callable[[], None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not _SLUG.fullmatch(self.name):
            raise ValueError(f"a patch name is a lower_snake_case slug, got {self.name!r}")

    @property
    def units(self) -> Sequence[Part | Patch]:
        """Its parts; itself if it has none."""
        return self.parts or [self]

    @property
    def targets(self) -> list[Replacement]:
        """All that it replaces, in any part."""
        return [*self.replacements, *(r for part in self.parts for r in part.replacements)]

    @property
    def requirements(self) -> tuple[str, ...]:
        """Those of the patch, and of any part."""
        return tuple(dict.fromkeys(text for unit in self.units for text in self.gate_of(unit)))

    def gate_of(self, unit: Part | Patch) -> tuple[str, ...]:
        """The requirements of a part, or of the patch without parts."""
        return (*self.affects, *(unit.affects if unit is not self else ()))

    def part(self, name: str, *affects: str) -> Part:
        """Add a part, which is put in place, probed and reported by itself."""
        self.parts.append(part := Part(name, affects))
        return part

    def on_revert(self, function: Callable[[], None]) -> Callable[[], None]:
        """Register the decorated function to run after the patch is undone.

        It frees what the replacements created.  The patch may be applied again afterwards.
        """
        self.release = function
        return function
