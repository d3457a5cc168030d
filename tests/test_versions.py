"""The supported releases are the same everywhere in the repository."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from gemma4_compat import versions

ROOT = Path(__file__).parents[1]


def test_the_extra_has_the_floors():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = [Requirement(text) for text in project["optional-dependencies"]["gemma4"]]
    bounds = {r.name: str(r.specifier).removeprefix(">=") for r in extra}
    floors = {"torch": versions.OLDEST_TORCH, **versions.FLOORS}
    assert bounds.keys() == floors.keys()
    for name, floor in floors.items():
        assert Version(bounds[name]) == Version(floor)


def test_can_be_run_where_nothing_is_installed():
    tree = ast.parse(Path(versions.__file__).read_text(encoding="utf-8"))
    imports = [each for each in ast.walk(tree) if isinstance(each, (ast.Import, ast.ImportFrom))]
    assert [each.module for each in imports] == ["__future__"]


def test_the_newest_are_not_older_than_the_others():
    assert versions.FLOORS.keys() == versions.USERS.keys() == versions.NEWEST.keys()
    for name in versions.LIBRARIES:
        stacks = (versions.FLOORS, versions.USERS, versions.NEWEST)
        releases = [Version(stack[name]) for stack in stacks]
        assert releases == sorted(releases)


def test_the_measured_releases_of_torch():
    files = (ROOT / "tools" / "measured").glob("*.json")
    measured = {Version(row["torch"]) for file in files for row in json.loads(file.read_text())}
    assert max(measured) == Version(versions.NEWEST_TORCH)
    assert (
        Version(versions.OLDEST_TORCH) <= min(measured) < Version(versions.TORCH) <= max(measured)
    )


def test_nox_names_no_release_of_its_own():
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert not [name for name in versions.LIBRARIES if f'"{name}==' in text]
