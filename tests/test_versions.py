"""The supported releases are the same everywhere in the repository."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from gemma4_compat import versions
from gemma4_compat.patches import topics

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


NOX = (ROOT / "noxfile.py").read_text(encoding="utf-8")


def assigned(name):
    """The expression that noxfile.py gives a name; it cannot be imported without nox."""
    assignments = (each for each in ast.parse(NOX).body if isinstance(each, ast.Assign))
    return next(each.value for each in assignments if ast.unparse(each.targets[0]) == name)


def test_nox_names_no_release_of_its_own():
    assert not [name for name in versions.LIBRARIES if f'"{name}==' in NOX]


def test_quick_has_a_test_of_each_topic():
    smoke = {each.partition("::")[0] for each in ast.literal_eval(assigned("SMOKE"))}
    files = (ROOT / "tests" / "patches" / each for each in smoke)
    assert all(file.exists() for file in files)
    names = {each.removeprefix("test_").removesuffix(".py") for each in smoke}
    of = {topic: {module.PATCH.name for module in modules} for topic, modules in topics().items()}
    of.pop("legacy")  # the newest stack needs none of these
    assert [topic for topic, patches in of.items() if not names & patches] == []


def test_every_session_is_described():
    """In CONTRIBUTING.md, and no other."""
    names = re.findall(r"^@nox\.session(?:\((.*)\))?\n(?:@.*\n)*def (\w+)", NOX, re.MULTILINE)
    sessions = {(re.findall(r'name="(.+?)"', options) or [name])[0] for options, name in names}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| `nox -s` | |\n")[2].partition("\n\n")[0]
    assert {*re.findall(r'^\| `"?([\w-]+)', table, re.MULTILINE)} == sessions


def test_the_workflow_has_every_stack():
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if not workflow.exists():
        pytest.skip("not in the sdist")
    [stacks] = re.findall(r"stack: \[(.+)\]", workflow.read_text(encoding="utf-8"))
    assert stacks.split(", ") == [key.value for key in assigned("STACKS").keys]
