"""The patch and the test that `nox -s new` writes keep the contract of all patches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAME = "iterated_view"
PATCH, TEST = f"gemma4_compat/patches/offloading/{NAME}.py", f"tests/patches/test_{NAME}.py"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project whose only patch is a copy of the template."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "not_patched.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("benchmarks", "gemma4_compat", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (folder / "gemma4_compat" / "patches").glob("*/[a-z]*.py"):
        file.unlink()
    said = python(folder, "tools/new.py", NAME)
    assert f"wrote {PATCH}\nwrote {TEST}\n" in said
    return folder


def test_copies_say_nothing_of_the_template(project):
    for file in (PATCH, TEST):
        text = (project / file).read_text(encoding="utf-8")
        assert text.startswith('"""')
        assert "template" not in text
        assert "patch_name" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage: nox -s new -- NAME"),
        (("Not-a-name",), "'Not-a-name' is not a lower_snake_case name"),
        ((NAME, "offlaoding"), "the topics are adapters, attention, avx512_cpu, "),
        ((NAME,), "a patch has that name already"),
    ],
)
def test_what_cannot_be_copied(project, arguments, message):
    result = subprocess.run(
        [sys.executable, "tools/new.py", *arguments],
        capture_output=True, text=True, timeout=60, cwd=project, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert message in result.stderr


def python(project, *arguments, **environ):
    found = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMA4_COMPAT", "PYTEST_"))}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(project), found.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=600, cwd=project,
        env={**found, **environ}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pytest_on(project, *arguments, **environ):
    return python(project, "-m", "pytest", "-p", "no:cacheprovider", *arguments, **environ)


@pytest.mark.slow
def test_keeps_the_contract(project):
    # Skips slow tests that are about the engine, or about other classes and patches.
    left_out = ("ordinary_use", "switched_off", "stacking_order", "blocked_where")
    wanted = " and ".join(f"not {each}" for each in left_out)
    said = pytest_on(project, "tests/test_contract.py", "-k", wanted)
    assert "skipped" not in said, "the installed accelerate lies outside the template's gate"


def test_fixes_its_bug(project):
    said = pytest_on(project, TEST)
    assert "3 passed" in said


def test_the_bug_is_there_without_it(project):
    said = pytest_on(project, TEST, "-m", "regression", GEMMA4_COMPAT="0")
    assert "2 regression tests show their bug" in said


def test_is_in_the_documentation(project):
    said = python(project, "tools/catalog.py")
    assert f'<a id="{NAME}"></a>' in said


def test_is_no_patch_itself():
    from gemma4_compat.patches import load

    assert not {"_template", "template", "patch_name"} & {patch.name for patch in load()}
