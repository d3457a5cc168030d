"""Version gates: requirement strings, checked against the installed versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # its import is a third of this package's; it is needed to evaluate a gate only
    from packaging.requirements import Requirement


class Outcome(Enum):
    """Whether the installed versions lie inside the gate."""

    INSIDE = "inside"
    OUTSIDE = "outside"
    MISSING = "missing"
    #: a distribution is older than the oldest supported version
    TOO_OLD = "too old"
    #: a development build or an unknown version: only a probe can decide
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Evaluation:
    """A gate's outcome, and the installed versions that it depends on (``None``: unknown)."""

    outcome: Outcome
    versions: dict[str, str | None]
    reason: str


@cache
def installed_version(distribution: str) -> str | None:
    """The installed version; ``None`` if the package has no metadata, as in a frozen application.

    Raises:
        importlib.metadata.PackageNotFoundError: the package is not installed.
    """
    import importlib.metadata
    import importlib.util

    try:
        return importlib.metadata.version(distribution)
    except Exception:  # missing or broken metadata
        try:
            spec = importlib.util.find_spec(distribution.replace("-", "_"))
        except (ImportError, ValueError):  # a module in sys.modules without a spec
            return None
        if spec is None or spec.origin is None:  # a folder without ``__init__.py`` is no package
            raise importlib.metadata.PackageNotFoundError(distribution) from None
        return None


def evaluate(affects: Sequence[str], floors: Mapping[str, str] | None = None) -> Evaluation:
    """Check the requirements against the installed distributions.  All of them must hold.

    ``floors`` maps distributions to their oldest supported versions.  The outcome is
    ``TOO_OLD`` if one of the requirements names a distribution with an older version.

    Raises:
        ValueError: a requirement is not valid.
    """
    requirements = [_parsed(text) for text in affects]
    outcomes = {requirement: _check(requirement) for requirement in requirements}
    missing = {each.name for each, outcome in outcomes.items() if outcome is Outcome.MISSING}
    found = dict.fromkeys(each.name for each in requirements if each.name not in missing)
    versions = {name: installed_version(name) for name in found}
    if missing:
        reason = f"{', '.join(sorted(missing))} not installed"
        return Evaluation(Outcome.MISSING, versions, reason)
    if old := too_old({name: floor for name, floor in (floors or {}).items() if name in versions}):
        return Evaluation(Outcome.TOO_OLD, versions, "; ".join(old.values()))
    required = " and ".join(map(str, requirements))
    installed = ", ".join(f"{name} {v or '(unknown)'}" for name, v in versions.items())
    reason = f"affects {required}; installed: {installed}"
    for outcome in (Outcome.OUTSIDE, Outcome.UNDECIDED):
        if outcome in outcomes.values():
            return Evaluation(outcome, versions, reason)
    return Evaluation(Outcome.INSIDE, versions, reason)


def too_old(floors: Mapping[str, str]) -> dict[str, str]:
    """The installed distributions that are older than these versions, and a text about each."""
    floor_of = {name: _parsed(f"{name}>={floor}") for name, floor in floors.items()}
    return {
        name: f"{name} {installed_version(name)} is too old (needs {floors[name]})"
        for name, floor in floor_of.items()
        if _check(floor) is Outcome.OUTSIDE
    }


def upgrade(floors: Mapping[str, str]) -> str:
    """The command that installs these versions or newer ones."""
    return "pip install -U " + " ".join(f'"{name}>={floor}"' for name, floor in floors.items())


def holds(requirement: str) -> bool:
    """Whether one requirement is met.  An unknown or pre-release version meets it."""
    return _check(_parsed(requirement)) in (Outcome.INSIDE, Outcome.UNDECIDED)


def later(versions: Mapping[str, str | None], newest: Mapping[str, str]) -> list[str]:
    """The distributions, with their versions, that are later than their version in ``newest``."""
    from packaging.version import InvalidVersion, Version

    releases = []
    for name, version in versions.items():
        with suppress(InvalidVersion):
            # "2.13.0+cu130" is not later than "2.13.0".
            release = Version(version or "").public
            if name in newest and Version(release) > Version(newest[name]):
                releases.append(f"{name} {version}")
    return releases


@cache
def _parsed(requirement: str) -> Requirement:
    from packaging.requirements import Requirement

    return Requirement(requirement)


def _check(requirement: Requirement) -> Outcome:
    import importlib.metadata

    from packaging.version import InvalidVersion, Version

    try:
        version = Version(installed_version(requirement.name) or "")
    except importlib.metadata.PackageNotFoundError:
        return Outcome.MISSING
    except InvalidVersion:
        return Outcome.UNDECIDED
    if version.is_prerelease:
        # "5.23.0.dev0" lies outside ">=5.23" and outside "<5.23": only a probe can decide.
        return Outcome.UNDECIDED
    return Outcome.INSIDE if requirement.specifier.contains(version) else Outcome.OUTSIDE
