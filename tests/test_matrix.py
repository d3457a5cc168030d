"""The gates agree with the measurements on released versions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gemma4_compat.patches import load
from gemma4_compat.versions import FLOORS, NEWEST, USERS
from tools.matrix import releases, with_, without
from tools.measured import DATA, Measured, Run

MEASURED = Measured.read(DATA)
PATCHES = {patch.name: patch for patch in load()}
MEASURE = "not measured: nox -s measure --"
#: Without the patches, another bug ends the tests of these.
UNSEEN = ("offload_streaming",)


def needs_a_gpu(name):
    """Whether every regression test of the patch is marked ``cuda``."""
    file = Path(__file__).parent / "patches" / f"test_{name}.py"
    functions = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
    marks = [[ast.unparse(mark) for mark in function.decorator_list] for function in functions]
    regression = f"pytest.mark.regression('{name}'"
    of_patch = [each for each in marks if any(mark.startswith(regression) for mark in each)]
    return bool(of_patch) and all("pytest.mark.cuda" in each for each in of_patch)


def inside(patch, stack):
    floors = [f"{name}>={version}" for name, version in FLOORS.items()]
    gates = [map(Requirement, (*patch.gate_of(unit), *floors)) for unit in patch.units]
    known = [[each for each in gate if each.name in stack] for gate in gates]  # TRL is not measured
    return any(all(each.specifier.contains(stack[each.name]) for each in gate) for gate in known)


@pytest.mark.parametrize("name", PATCHES)
def test_gate_agrees(name):
    """With the bug, the gate is open and the patch works; without it, the patch is not applied."""
    assert name in MEASURED.by_patch, f"{MEASURE} {name}"
    wrong = []
    for found in MEASURED.by_patch[name]:
        fine = found.with_ != "fails" and found.state not in ("drifted", "failed")
        if found.without == "broken":
            fine &= inside(PATCHES[name], found.stack)
            fine &= (found.with_, found.state) == ("works", "applied")
        elif found.without == "fixed":
            fine &= not inside(PATCHES[name], found.stack) or found.state == "fixed upstream"
        if not fine:
            wrong.append(found)
    assert not wrong


@pytest.mark.parametrize("name", PATCHES)
def test_every_bug_was_seen(name):
    assert name in MEASURED.by_patch, f"{MEASURE} {name}"
    seen = {found.without for found in MEASURED.by_patch[name]}
    assert ("broken" in seen) != (name in UNSEEN)


@pytest.mark.parametrize("name", [name for name in PATCHES if needs_a_gpu(name)])
@pytest.mark.parametrize("stack", [USERS, FLOORS, NEWEST], ids=["users", "oldest", "newest"])
def test_patches_that_show_on_a_gpu_alone(stack, name):
    """They were measured on a GPU; bitsandbytes there is one whose binaries fit its CUDA."""
    if not inside(PATCHES[name], stack):
        return
    stack = {library: stack[library] for library in stack if library != "bitsandbytes"}
    on_gpus = (found for found in MEASURED.by_patch[name] if found.stack["device"] == "cuda")
    assert any(stack.items() <= found.stack.items() for found in on_gpus)


@pytest.mark.parametrize("stack", [USERS, FLOORS, NEWEST], ids=["users", "oldest", "newest"])
def test_every_patch_was_measured_on_the_stacks_of_the_tests(stack):
    """The other stacks are measured before a release."""
    missing = [
        name
        for name in PATCHES
        if not any(stack.items() <= each.stack.items() for each in MEASURED.by_patch.get(name, ()))
    ]
    assert not missing, f"{MEASURE} {' '.join(missing)}"


def test_no_release_is_left_out():
    minors = {version.rpartition(".")[0] for version in MEASURED.releases("transformers")}
    newest = int(NEWEST["transformers"].split(".")[1])
    assert minors >= {f"5.{minor}" for minor in range(6, newest + 1)}


def test_newest_versions_are_those_measured():
    assert MEASURED.newest() == NEWEST


# -- the instrument itself ----------------------------------------------------------------------


def test_releases():
    index = ["5.5.4", "5.8.0", "5.8.1", "5.6.1", "5.6.0", "5.9.0rc1", "5.10.0"]
    assert releases("transformers", index) == ["5.6.0", "5.6.1", "5.8.1", "5.10.0"]
    assert releases("peft", ["0.17.1", "0.18.0", "0.18.1"]) == ["0.18.0", "0.18.1"]


@pytest.mark.parametrize(
    ("outcomes", "bug", "patch"),
    [
        ([], "unknown", "unknown"),
        (["skipped"], "unknown", "unknown"),
        (["skipped", "passes"], "fixed", "works"),
        (["passes", "bug"], "broken", "fails"),
        (["passes", "ValueError: another"], "unknown", "fails"),
    ],
)
def test_verdicts(outcomes, bug, patch):
    assert without(outcomes) == bug
    assert with_(outcomes) == patch


def test_runs():
    verdicts = {"5.6.0": "fixed", "5.6.2": "broken", "5.7.0": "broken", "5.10.0": "unknown"}
    entries = [
        {**USERS, "transformers": version, "result": f"{verdict}/works/applied"}
        for version, verdict in (*verdicts.items(), ("5.11.0", "fixed"))
    ]
    measured = Measured({"p": entries})
    assert measured.runs("p", "transformers") == [
        Run(False, "5.6.0", "5.6.0"),
        Run(True, "5.6.2", "5.7.0"),
        Run(False, "5.11.0", "5.11.0"),
    ]
    assert measured.runs("another", "transformers") == []
    assert measured.on_newest("p") == "fixed"
