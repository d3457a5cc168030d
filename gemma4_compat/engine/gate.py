"""Version gates: PEP 508 requirement strings over what is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

__all__ = ["Gate", "Outcome", "Requirement", "evaluate", "installed_version"]


class Outcome(Enum):
    """What the gate says of the installed versions."""

    INSIDE = "inside"
    OUTSIDE = "outside"
    MISSING = "missing"
    #: a development build or an unknown version: only a probe can tell
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Gate:
    """A gate's outcome, with the versions it was decided on (``None``: unknown)."""

    outcome: Outcome
    versions: dict[str, str | None]
    reason: str


@lru_cache(maxsize=None)
def installed_version(distribution: str) -> str | None:
    """The installed version, or ``None`` where the package is there without metadata.

    Raises:
        importlib.metadata.PackageNotFoundError: the package is not there at all.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # Frozen applications ship packages without their metadata.
        if importlib.util.find_spec(distribution.replace("-", "_")) is None:
            raise
        return None


def evaluate(alternatives: Sequence[Sequence[str]]) -> Gate:
    """Check alternatives (any) of requirements (all) against the installed distributions."""
    versions: dict[str, str | None] = {}
    missing: set[str] = set()
    undecided = False
    for alternative in alternatives:
        outcomes = {_check(Requirement(text), versions, missing) for text in alternative}
        if outcomes == {Outcome.INSIDE}:
            return Gate(Outcome.INSIDE, versions, _describe(alternatives, versions))
        if Outcome.OUTSIDE not in outcomes and Outcome.MISSING not in outcomes:
            undecided = True
    description = _describe(alternatives, versions)
    if undecided:
        return Gate(Outcome.UNDECIDED, versions, description)
    if missing:
        names = ", ".join(sorted(missing))
        return Gate(Outcome.MISSING, versions, f"{names} not installed")
    return Gate(Outcome.OUTSIDE, versions, description)


def holds(requirement: str) -> bool:
    """Whether one requirement is met; unknown versions count as met."""
    outcome = _check(Requirement(requirement), {}, set())
    return outcome in (Outcome.INSIDE, Outcome.UNDECIDED)


def _check(
    requirement: Requirement, versions: dict[str, str | None], missing: set[str]
) -> Outcome:
    name = requirement.name
    try:
        found = versions[name] = installed_version(name)
    except importlib.metadata.PackageNotFoundError:
        missing.add(name)
        return Outcome.MISSING
    if found is None:
        return Outcome.UNDECIDED
    try:
        version = Version(found)
    except InvalidVersion:
        return Outcome.UNDECIDED
    if version.is_prerelease:
        # "5.23.0.dev0" lies outside ">=5.23" and outside "<5.23": only the code itself can tell.
        return Outcome.UNDECIDED
    inside = requirement.specifier.contains(version)
    return Outcome.INSIDE if inside else Outcome.OUTSIDE


def _describe(alternatives: Sequence[Sequence[str]], versions: dict[str, str | None]) -> str:
    wanted = " or ".join(" and ".join(alternative) for alternative in alternatives)
    found = ", ".join(f"{name} {version or '(unknown)'}" for name, version in versions.items())
    return f"affects {wanted}; found {found}"
