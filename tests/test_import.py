"""Import of the package in fresh processes: the modules that it loads, and those that it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemma4_compat.engine.patch import FAST_MEANS
from gemma4_compat.versions import WITH_TORCH

pytestmark = pytest.mark.each_stack

ROOT = Path(__file__).parents[1]
REPORT = """
import gemma4_compat, json, sys
print(json.dumps({
    "loaded": sorted(sys.modules),
    "patches": {s.name: [s.state.value, s.reason] for s in gemma4_compat.status()},
}))
"""


def python(*arguments, path=(), drop=(), **environ):
    """Run this interpreter with the package and the libraries of this process on its path."""
    found = {k: v for k, v in os.environ.items() if not k.startswith("GEMMA4_COMPAT")}
    inherited = [] if "PYTHONPATH" in drop else [found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, path), str(ROOT), *inherited]))
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={**found, **environ}, check=False,
    )  # fmt: skip


def report(*flags, **options):
    result = python(*flags, "-c", REPORT, **options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@pytest.fixture
def bare(tmp_path):
    """A folder with only the dependencies of the package."""
    for name in ("wrapt", "packaging"):
        package = Path(importlib.util.find_spec(name).origin).parent
        (tmp_path / name).symlink_to(package)
    return tmp_path


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("-O",),
        ("-OO",),
        ("-W", "error"),
        ("-X", "dev"),
        ("-X", "importtime"),
        ("-X", "frozen_modules=off"),
        ("-bb",),
        ("-P",),
    ],
    ids=" ".join,
)
def test_loads_no_library_and_says_nothing(flags):
    if flags == ("-P",) and sys.version_info < (3, 11):
        pytest.skip("no such option")
    found, stderr = report(*flags)
    assert not set(WITH_TORCH) & set(found["loaded"])
    assert found["patches"]
    assert "importtime" in flags or stderr == ""


def test_without_any_library(bare):
    found, stderr = report("-S", path=[bare], drop=["PYTHONPATH"])
    for state, reason in found["patches"].values():
        assert state == "not installed"
        assert reason.endswith(" not installed")
        assert "transformers" in reason
    assert stderr == ""


def test_without_the_libraries_of_this_process():
    found, _ = report(drop=["PYTHONPATH"])
    for state, reason in found["patches"].values():
        assert state in ("not installed", "unaffected", "armed", "optional")
        assert reason


def test_states_say_why():
    from gemma4_compat.engine import Kind
    from gemma4_compat.engine.gate import Outcome
    from gemma4_compat.patches import gate, load

    found, _ = report()
    expected = {
        Outcome.INSIDE: ("armed", "waits for the import of "),
        Outcome.UNDECIDED: ("armed", "waits for the import of "),
        Outcome.OUTSIDE: ("unaffected", "affects "),
        Outcome.MISSING: ("not installed", ""),
    }
    for patch in load():
        state, reason = found["patches"][patch.name]
        wanted, start = expected[gate(patch).outcome]
        if wanted == "armed" and patch.kind is Kind.FAST:
            wanted, start = "optional", f"{FAST_MEANS}: to have them, set GEMMA4_COMPAT_FAST=1"
        assert state == wanted
        # Without targets in these releases, a patch waits for the one that it requires only.
        assert start in reason or (patch.requires and "needs " in reason)


def test_half_installed_library(tmp_path, bare):
    """The user sees the library's own ImportError."""
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("from . import peft_model")
    (tmp_path / "peft" / "peft_model.py").write_text("raise ImportError('libsomething.so')")
    code = (
        "import gemma4_compat\ntry:\n    import peft\nfinally:\n    print(gemma4_compat.status())"
    )
    for flags, options in ((), {}), (("-S",), {"drop": ["PYTHONPATH"]}):
        result = python(*flags, "-c", code, path=[tmp_path], **options)
        assert result.returncode == 1
        assert result.stderr.strip().endswith("ImportError: libsomething.so")
        assert result.stderr.count("Traceback") == 1
        assert "failed" not in result.stdout


def test_library_folder_that_is_no_package(tmp_path, bare):
    """A folder with a library's name, such as a clone, in the working directory."""
    for name in WITH_TORCH:
        (tmp_path / name / "src").mkdir(parents=True)
    found, _ = report("-S", path=[bare], drop=["PYTHONPATH"])
    assert {state for state, _ in found["patches"].values()} == {"not installed"}


def test_stand_ins_in_sys_modules():
    code = (
        "import sys, types\n"
        f"for name in {WITH_TORCH!r}: sys.modules[name] = types.ModuleType(name)\n"
        "import gemma4_compat; print(len(gemma4_compat.status()))"
    )
    for flags in ((), ("-W", "error")):
        result = python(*flags, "-c", code)
        assert (result.returncode, result.stderr) == (0, "")


def test_switches():
    result = python("-c", REPORT, GEMMA4_COMPAT="0", GEMMA4_COMPAT_STRIKT="1")
    found = json.loads(result.stdout)
    assert {tuple(each) for each in found["patches"].values()} == {("disabled", "GEMMA4_COMPAT=0")}
    assert "unknown environment variable GEMMA4_COMPAT_STRIKT" in result.stderr
    assert "did you mean GEMMA4_COMPAT_STRICT?" in result.stderr


def test_patches_are_read_when_a_library_is_imported():
    from gemma4_compat.patches import load
    from gemma4_compat.versions import LIBRARIES

    targets = {each.module for patch in load() for each in patch.targets}
    # Each of the libraries imports torch, and TRL imports transformers.
    assert {module.partition(".")[0] for module in targets} == {*LIBRARIES, "torch", "trl"}
    code = """
import sys, gemma4_compat
ours = {"wrapt", "gemma4_compat.patches"}
print(ours & sys.modules.keys())
import accelerate.hooks
print(ours - sys.modules.keys(), [f for f in sys.meta_path if type(f).__name__ == "_FirstImport"])
print(gemma4_compat.status()["offload_threads"].state)
"""
    assert python("-c", code).stdout.splitlines() == ["set()", "set() []", "applied"]


def test_imported_anew_reloaded_and_in_threads():
    code = """
import importlib, sys, threading
def load():
    import gemma4_compat
    gemma4_compat.status()
threads = [threading.Thread(target=load) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
import gemma4_compat
engine = gemma4_compat._engine
assert importlib.reload(gemma4_compat)._engine is engine
for name in [name for name in sys.modules if name.partition(".")[0] == "gemma4_compat"]:
    del sys.modules[name]
import gemma4_compat as anew
assert anew._engine is not engine
assert len(engine.status()) == 0
assert len(anew.status()) > 0
"""
    result = python("-W", "error", "-c", code)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_probes_draw_no_random_numbers():
    """``set_seed`` before the first import of PEFT has the same effect as without the package."""
    pytest.importorskip("peft")
    code = """
import gemma4_compat, torch
torch.manual_seed(0)
gemma4_compat.status(import_targets=True)
print(torch.rand(1).item())
"""
    found, expected = (python("-W", "ignore", "-c", code, GEMMA4_COMPAT=on) for on in ("1", "0"))
    assert found.returncode == expected.returncode == 0, found.stderr + expected.stderr
    lines = [each.stdout.splitlines()[-1] for each in (found, expected)]
    assert lines == [str(torch_rand())] * 2


def torch_rand():
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.rand(1).item()


def test_what_a_notebook_finds(bare):
    """``dir()`` shows the public names; the functions of other modules come when they are asked."""
    code = (
        "import sys, gemma4_compat\n"
        "assert dir(gemma4_compat) == sorted(gemma4_compat.__all__), dir(gemma4_compat)\n"
        "later = {f'gemma4_compat.{name}' for name in ('html', 'inspection', 'planning')}\n"
        "assert not later & set(sys.modules)\n"
        "assert '<p>' in gemma4_compat.status()._repr_html_()\n"
        "assert sys.modules['gemma4_compat.results.html']\n"
        "for name in ('plan', 'merge', 'inspect_model', 'inspect_adapter'):\n"
        "    assert getattr(gemma4_compat, name).__name__ == name\n"
        f"assert not {{*{WITH_TORCH!r}}} & set(sys.modules)"
    )
    result = python("-S", "-c", code, path=[bare], drop=["PYTHONPATH"])
    assert (result.returncode, result.stderr) == (0, "")
