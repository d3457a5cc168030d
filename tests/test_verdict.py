"""What the commands say where a library is missing, too old or broken.

The cases run in processes whose libraries are links to the installed ones.  One of them is left
out, or its metadata has an older version, or its import raises.
"""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from gemma4_compat.versions import FLOORS, OLDEST_TORCH, REQUIRED, WITH_TORCH
from tests.support import run_process

BROKEN = "libsomething.so: cannot open shared object file"
CASES = [(library, how) for how in ("missing", "too old", "broken") for library in WITH_TORCH]
OLDEST = {"torch": OLDEST_TORCH, **FLOORS}
QUICK = (("transformers", "missing"), ("transformers", "too old"))


@pytest.fixture
def command(tmp_path):
    """Returns a function that runs a command with one library as the case says."""

    def make(library, how):
        folder = tmp_path / "packages"
        folder.mkdir()
        for each in Path(sysconfig.get_paths()["purelib"]).iterdir():
            name, is_info = each.name.partition("-")[0], each.suffix == ".dist-info"
            if each.suffix == ".pth" or name.startswith("gemma4_compat"):
                continue
            if name != library or (how == "too old") is not is_info:
                if name != library or how != "missing":
                    (folder / each.name).symlink_to(each)
            elif how == "too old":
                shutil.copytree(each, folder / each.name)
                file = folder / each.name / "METADATA"
                # transformers itself needs torch 2.6
                old = "2.7.1\nX: " if library == "torch" else "0."
                text = file.read_text().replace("\nVersion: ", f"\nVersion: {old}", 1)
                file.write_text(text)
            elif how == "broken":
                (folder / name).mkdir()
                (folder / name / "__init__.py").write_text(f"raise ImportError({BROKEN!r})")
        root = Path(__file__).parent.parent

        def run(*arguments, start=("-m", "gemma4_compat")):
            # -S: without site-packages
            words = [sys.executable, "-S", *start, *arguments]
            return run_process(words, [str(folder), str(root)], COLUMNS="200")

        return run

    return make


#: In one process, as the import of the libraries takes most of the time.
STATUS = """
import sys
from gemma4_compat.cli import main
code = main(["status"])
print("as JSON:")
assert main(["status", "--json"]) == code
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("library", "how"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_verdict(command, library, how):
    ran = command(library, how)(start=("-c", STATUS))
    text, _, printed = ran.stdout.partition("as JSON:\n")
    found = json.loads(printed)
    is_well = how == "missing" and library not in REQUIRED
    assert ran.returncode == (0 if is_well else 1)
    assert found["ok"] is is_well
    assert found["verdict"] in text
    assert ("all well: " if is_well else "NOT well: ") in text
    if how == "missing":
        assert found["libraries"][library] is None
        assert f"not installed: {library}; pip install {library}" in text
        assert found["problems"] == ([] if is_well else [f"{library} is not installed"])
        assert not ran.stderr
    elif how == "too old":
        assert f"is too old (needs {OLDEST[library]})" in found["problems"][0]
        assert f'pip install -U "{library}>={OLDEST[library]}"' in text
        [warning] = ran.stderr.splitlines()
        assert found["problems"][0] in warning
        states = {name: patch["state"] for name, patch in found["patches"].items()}
        assert "applied" in states.values() or library in ("transformers", "accelerate")
    else:
        assert found["problems"] == [f"{library} cannot be imported"]
        assert BROKEN in text
        assert not ran.stderr
        assert "failed" not in {patch["state"] for patch in found["patches"].values()}


@pytest.mark.slow
@pytest.mark.parametrize(("library", "how"), CASES)
def test_other_commands(command, library, how, model_dir, adapter_dir, tmp_path):
    """Each works, or says in one line what to install; a report says it, and prints the rest."""
    run, texts = command(library, how), {}
    device_map = '{"": "cpu"}'
    for arguments in (
        ["plan", str(model_dir), "--gpu", "12GiB"],
        ["map", str(model_dir), "--map", device_map],
        ["scan", str(model_dir), "--targets", "q_proj"],
        ["adapter", str(adapter_dir), "--model", str(model_dir)],
        ["merge", str(model_dir), str(adapter_dir), str(tmp_path / "merged")],
        ["demo"],
    ):
        ran = run(*arguments)
        assert "Traceback" not in ran.stderr, ran.stderr
        if ran.returncode == 2:
            assert (
                ran.stderr.count("\ngemma4-compat ") + ran.stderr.startswith("gemma4-compat ") == 1
            )
            texts[arguments[0]] = ran.stderr
        else:
            assert ran.returncode in (0, 1)
    expected = {
        "missing": f"pip install {library}",
        "too old": f'pip install -U "{library}>={OLDEST.get(library)}"',
        "broken": "libsomething.so",
    }[how]
    assert "demo" in texts
    assert all(expected in text for text in texts.values()), texts
    if library in REQUIRED:
        assert set(texts) == {"plan", "map", "scan", "adapter", "merge", "demo"}

    options = ["--model", str(model_dir), "--map", device_map, "--adapter", str(adapter_dir)]
    ran = run("report", *options)
    assert ran.returncode == 0, ran.stderr
    for heading in ("### System", "### Patches of gemma4_compat", "### Model", "### Adapter"):
        assert heading in ran.stdout
    assert library in ran.stdout


def test_a_model_that_was_dispatched_before_the_import():
    code = """
        import json, torch, transformers
        from accelerate import dispatch_model

        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model = dispatch_model(model, {"0": "cpu", "1": "cpu"}, main_device="cpu", force_hooks=True)
        import gemma4_compat

        found = gemma4_compat.status()
        del model
        later = gemma4_compat.status()
        print(json.dumps([found.ok, found.problems, later.problems]))
    """
    ok, problems, later = json.loads(
        run_process(
            [sys.executable, "-c", textwrap.dedent(code)], [str(Path(__file__).parent.parent)]
        ).stdout.splitlines()[-1]
    )
    assert not ok
    [text] = set(problems) - set(later)
    why = "dispatched before this package was imported, without its patches"
    assert text == f"{why}: Sequential; load it again"
