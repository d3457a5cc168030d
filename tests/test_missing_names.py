"""Names of the libraries that are gone: the package steps aside, and raises nothing of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import private_names

# Its results of another process are cached in a worker.
pytestmark = pytest.mark.xdist_group("missing names")

ROOT = Path(__file__).parents[1]
#: Without these, an earlier code of this package raised in users' forwards.
KNOWN = (
    "torch._C._are_functorch_transforms_active",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._nn._parse_to",
    "torch.nn.Module()._parameters",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.overrides._get_current_function_mode_stack",
    "transformers.loss.loss_utils.fixed_cross_entropy",
)
WORKS = ("plain", "offloaded", "dispatched", "trained", "experts", "native")


def test_the_tables_are_current():
    """Run ``python tools/private_names.py`` after a change of what the package reads."""
    assert private_names.PAGE.read_text(encoding="utf-8") == private_names.page()
    assert private_names.NAMES.read_text(encoding="utf-8") == private_names.json_text()
    listed = private_names.by_patch("listed")
    assert not {name for names in listed.values() for name in names if name.startswith(".")}


def test_reads_that_the_table_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(private_names, "PACKAGE", tmp_path)
    file = tmp_path / "patch.py"
    file.write_text(
        "import torch\n"
        "def forward(module):\n"
        "    from accelerate.utils import send_to_device\n"
        "    own = torch._C\n"
        "    own._nn.linear, module._forward_hooks\n"
        "    try:\n"
        "        torch.overrides._stack\n"
        "    except AttributeError:\n"
        "        getattr(module, '_compiled', None)\n"
    )
    assert {read[::3] for read in private_names.File(file).reads} == {
        ("._compiled", "asked"),
        ("._forward_hooks", "listed"),
        ("accelerate.utils.send_to_device", "listed"),
        ("torch._C", "listed"),
        ("torch._C._nn.linear", "listed"),
        ("torch.overrides._stack", "caught"),
    }
    file.write_text("getattr(object, f'_{name}')")
    with pytest.raises(ValueError, match="write the private names out"):
        private_names.File(file)


@functools.cache
def outcomes(*arguments):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GEMMA4_COMPAT")}
    environ["GEMMA4_COMPAT_FAST"] = "1"
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", "-m", "tests.missing_names", json.dumps(arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=3600, cwd=ROOT, env=environ, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def check(found):
    """Nothing raises or differs; the patches that read the name say that it is gone, once."""
    assert found["errors"] == {}, found
    if found["listed"]:
        states = {*found["patches"].values()}
        assert states <= {"drifted", "failed", "blocked", "fixed upstream", "armed"}, found
    changed = {**found["patches"], **found["others"]}
    aside = [name for name, state in changed.items() if state in ("drifted", "failed")]
    assert sorted(
        {text.partition(":")[0].partition(" (")[0] for text in found["warned"]}
    ) == sorted(aside), found


def test_one_name_is_gone():
    """Forward, a labeled step, generate, save."""
    found = outcomes(("plain",), KNOWN)
    assert len(found) > 100
    for name, outcome in found.items():
        if isinstance(outcome, dict):
            check(outcome)
        else:
            assert outcome, f"{name} is in names.json, but its absence is not noticed"
    assert all(isinstance(found[name], dict) for name in KNOWN)


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS)
def test_one_name_is_gone_in_all_that_users_do(work):
    for outcome in outcomes((work,)).values():
        check(outcome)
