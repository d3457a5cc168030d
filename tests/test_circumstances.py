"""Threads, child processes, reloads, unusual layouts and late imports, with the real libraries.

One patch represents all: the quant state of a 4-bit weight survives a move to meta and back.
"""

from __future__ import annotations

import compileall
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gemma4_compat.engine import gate
from gemma4_compat.versions import WITH_TORCH
from tests.test_import import ROOT, python

PATCH = "quant_state_offload"
ASK = """
import sys

def spared():
    "Whether the original keeps its quant state when a copy of the weight goes to meta."
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn.modules import Params4bit

    state = QuantState(absmax=torch.ones(1), code=torch.ones(16), blocksize=64)
    weight = torch.zeros(32, 1, dtype=torch.uint8)
    Params4bit(weight, quant_state=state, bnb_quantized=True).to("meta")
    return not state.absmax.is_meta

def states():
    import gemma4_compat
    return {s.name: [s.state.value, s.reason] for s in gemma4_compat.status()}
"""
STATES = """
import gemma4_compat, json
from ask import spared, states
gemma4_compat._engine.import_targets()
versions = {name: version for s in gemma4_compat.status() for name, version in s.versions.items()}
print(json.dumps({"states": states(), "spared": spared(), "versions": versions}))
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """A folder with the module ``ask``, which the processes of these tests import."""
    for name in WITH_TORCH:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    folder = tmp_path_factory.mktemp("ask")
    (folder / "ask.py").write_text(ASK)
    return folder


@pytest.fixture(scope="module")
def usual(ask):
    """The states in a process in ordinary circumstances."""
    found = finds(STATES, path=[ask])
    assert found["spared"]
    if found["states"][PATCH][0] != "applied":
        pytest.skip(f"these versions do not need {PATCH}")
    return found


def finds(code, *flags, **options):
    """The last line that the code prints, as JSON."""
    return parsed(python(*flags, "-c", code, **options))


def parsed(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def finds_in(layout, code, *flags):
    """The same, with only the packages in ``layout``, a list of folders or zip files.

    The second of them is the working directory of the process.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GEMMA4_COMPAT")}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, layout))
    return parsed(
        subprocess.run(
            [sys.executable, "-S", *flags, "-c", code], capture_output=True, text=True,
            timeout=300, cwd=layout[1], env=environ, check=False,
        )
    )  # fmt: skip


def links(folder, *, without):
    """Links to all installed packages in new folders, without those that begin with ``without``."""
    made = []
    for number, entry in enumerate(sys.path):
        if any(Path(entry).glob("*.dist-info")):
            made.append(folder / f"packages{number}")
            made[-1].mkdir()
            for each in Path(entry).iterdir():
                if not each.name.startswith(tuple(without)):
                    (made[-1] / each.name).symlink_to(each)
    return made


def location(package):
    return Path(importlib.util.find_spec(package).origin).parent


def sources(package):
    return (path for path in location(package).rglob("*") if "__pycache__" not in path.parts)


def zipped(folder, *packages):
    path = folder / "packages.zip"
    with zipfile.ZipFile(path, "w") as file:
        for package in packages:
            for source in sources(package):
                file.write(source, source.relative_to(location(package).parent))
    return path


def without_sources(folder, package):
    """Copy the package with .pyc files instead of its .py files."""
    copy = folder / package
    shutil.copytree(location(package), copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(copy, quiet=2, legacy=True)
    for source in copy.rglob("*.py"):
        source.unlink()


# -- threads and processes -------------------------------------------------------------------------


@pytest.mark.slow
def test_threads(ask, usual):
    """Threads use one order: the libraries themselves cannot be imported in two orders at once."""
    code = """
import faulthandler, sys, threading
faulthandler.dump_traceback_later(240, exit=True)
sys.setswitchinterval(1e-5)
threads, errors = [], []
barrier = threading.Barrier(6)
def work():
    barrier.wait()
    try:
        import gemma4_compat
        import peft, bitsandbytes
        import transformers.models.gemma4.modeling_gemma4
        assert len(gemma4_compat.status())
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=work) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
"""
    assert finds(code + STATES, path=[ask]) == usual


CHILDREN = """
import json, multiprocessing, sys
from ask import spared

def child(late_import):
    first = "gemma4_compat" in sys.modules
    import accelerate.hooks, bitsandbytes.nn.modules
    if late_import:
        import gemma4_compat
    if "gemma4_compat" not in sys.modules:
        return [first, None, spared()]
    import gemma4_compat
    return [first, *gemma4_compat.status()["quant_state_offload"].state.value.split(), spared()]

if __name__ == "__main__":
    import gemma4_compat
    found = {}
    for method in multiprocessing.get_all_start_methods():
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = [pool.apply(child, [late]) for late in (False, True)]
    import accelerate.hooks, bitsandbytes.nn.modules
    assert spared()
    if "fork" in found:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found["fork, applied"] = [pool.apply(child, [late]) for late in (False, True)]
    from data import Data
    from torch.utils.data import DataLoader
    for method in {"fork", "spawn"}.intersection(multiprocessing.get_all_start_methods()):
        loader = DataLoader(Data(), num_workers=1, multiprocessing_context=method, collate_fn=list)
        found["DataLoader, " + method] = [*loader]
    print(json.dumps(found))
"""
DATA = """
import gemma4_compat
from ask import spared

class Data:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        import accelerate.hooks, bitsandbytes.nn.modules
        return [gemma4_compat.status()["quant_state_offload"].state.value, spared()]
"""


@pytest.mark.slow
def test_child_processes(tmp_path, ask, usual):
    """A forked child is patched; a spawned child is patched when it imports the package."""
    (tmp_path / "children.py").write_text(CHILDREN)
    (tmp_path / "data.py").write_text(DATA)
    found = parsed(python(tmp_path / "children.py", path=[ask]))
    for how, outcome in found.items():
        if how.startswith("DataLoader"):
            assert outcome == [[["applied", True]]], how
        elif how.startswith("fork") and how != "forkserver":
            assert outcome == [[True, "applied", True]] * 2, how
        else:
            assert outcome == [[False, None, False], [False, "applied", True]], how
    assert {"spawn", "DataLoader, spawn"} <= found.keys()


@pytest.mark.slow
def test_pytest_xdist(tmp_path, ask, usual):
    pytest.importorskip("xdist")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    code = STATES.replace("print(", "(out / worker_id).write_text(").replace("\n", "\n    ")
    (tmp_path / "test_states.py").write_text(
        f"import pathlib\nout = pathlib.Path({str(tmp_path)!r})\ndef test(worker_id):{code}"
    )
    flags = ["-p", "no:cacheprovider", "--dist", "each", "--tx", "2*popen", "-c"]
    result = python("-m", "pytest", *flags, tmp_path / "pytest.ini", tmp_path, path=[ask])
    assert "2 passed" in result.stdout, result.stdout
    for worker in ("gw0", "gw1"):
        assert json.loads((tmp_path / worker).read_text()) == usual


# -- reloading -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reloads_of_this_package(ask, usual):
    """Reload the package, and all its modules as autoreload does."""
    code = """
import importlib, json, sys
import gemma4_compat
import accelerate.hooks, bitsandbytes.nn.modules
from ask import spared, states
applied = {name for name, (state, _) in states().items() if state == "applied"}

def says():
    found = states()
    return [{n for n, (s, _) in found.items() if s == "applied"} == applied, spared()]

found = {}
importlib.reload(gemma4_compat)
found["gemma4_compat"] = says()
for name in [name for name in sys.modules if name.partition(".")[0] == "gemma4_compat"]:
    importlib.reload(sys.modules[name])
found["ours"] = says()
gemma4_compat.uninstall()
found["uninstalled"] = [spared(), gemma4_compat.status().ok]
gemma4_compat.install()
found["installed"] = says()
print(json.dumps(found))
"""
    assert finds(code, path=[ask]) == {
        "gemma4_compat": [True, True],
        "ours": [True, True],
        "uninstalled": [False, False],
        "installed": [True, True],
    }


@pytest.mark.slow
def test_reload_of_a_library(ask, usual):
    """A reloaded module has its own code, and the status says so; old classes stay patched."""
    code = """
import importlib, json
import gemma4_compat
import accelerate.hooks, bitsandbytes.nn.modules, torch
from bitsandbytes.functional import QuantState
from ask import spared, states
old = bitsandbytes.nn.modules.Params4bit

def old_spared():
    state = QuantState(absmax=torch.ones(1), code=torch.ones(16), blocksize=64)
    weight = torch.zeros(32, 1, dtype=torch.uint8)
    old(weight, quant_state=state, bnb_quantized=True).to("meta")
    return not state.absmax.is_meta

found = {"before": [*states()["quant_state_offload"], spared(), old_spared()]}
importlib.reload(bitsandbytes.nn.modules)
found["reloaded"] = [*states()["quant_state_offload"], spared(), old_spared()]
gemma4_compat.uninstall()
found["uninstalled"] = [*states()["quant_state_offload"], spared(), old_spared()]
print(json.dumps(found))
"""
    changed = "other code changed bitsandbytes.nn.modules.Params4bit.to"
    found = finds(code, path=[ask])
    assert found["before"] == ["applied", "", True, True]
    for when in ("reloaded", "uninstalled"):
        state, reason, new, old = found[when]
        assert (state, new, old) == ("applied", False, True)
        assert reason.startswith(changed)


# -- installations ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_library_that_cannot_be_imported(tmp_path, ask, usual):
    """The user gets the library's own error, and the patches after the library is repaired."""
    code = f"""
import importlib, json, logging, pathlib, shutil, sys
package = pathlib.Path({str(tmp_path)!r}) / "bitsandbytes"
package.mkdir()
import gemma4_compat
from ask import spared, states
found = {{}}
for error in ("ImportError", "OSError", "RuntimeError", "ModuleNotFoundError"):
    (package / "__init__.py").write_text(f"raise {{error}}('libcudart.so')")
    importlib.invalidate_caches()
    try:
        import bitsandbytes
    except Exception as raised:
        found[error] = [type(raised).__name__, str(raised), raised.__cause__ is None]
import accelerate, transformers
found["then"] = {{name: state for name, (state, _) in states().items()}}
gemma4_compat._engine.import_targets()
found["at last"] = states()
shutil.rmtree(package)
importlib.invalidate_caches()
gemma4_compat.install()
"""
    code = code + STATES.replace("print(json.dumps({", "print(json.dumps({**found, ")
    found = finds(code, "-X", "pycache_prefix=/nonexistent", path=[tmp_path, ask])
    for error in ("ImportError", "OSError", "RuntimeError", "ModuleNotFoundError"):
        assert found.pop(error) == [error, "libcudart.so", True]
    assert set(found.pop("then").values()) <= {"armed", "applied", "unaffected", "fixed upstream"}
    failed = {n: why for n, (state, why) in found.pop("at last").items() if state == "failed"}
    assert PATCH in failed
    assert all(
        why.startswith("cannot import ") and why.endswith("libcudart.so") for why in failed.values()
    )
    assert {n for n in usual["states"] if "bitsandbytes" not in n} > failed.keys()
    assert found == usual


@pytest.mark.slow
def test_library_with_a_missing_module(tmp_path, ask, usual):
    (tmp_path / "peft").mkdir()
    for each in location("peft").iterdir():
        if each.stem != "peft_model":
            (tmp_path / "peft" / each.name).symlink_to(each)
    code = "try:\n    import peft\nexcept ImportError as error:\n    name = error.name\n" + STATES
    found = finds(code.replace('{"states"', '{"name": name, "states"'), path=[tmp_path, ask])
    assert found.pop("name") == "peft.peft_model"
    states = {**usual["states"], **found["states"]}
    waiting = {n: states[n] for n, expected in usual["states"].items() if states[n] != expected}
    assert {"peft_redispatch", "gradient_accumulation"} <= waiting.keys()
    cause = r"waits for the import of (peft\.|transformers\.trainer)|needs \w+, which is armed"
    for state, why in waiting.values():  # transformers.trainer imports peft
        assert state == "armed"
        assert re.match(cause, why)
    assert found["spared"]


@pytest.mark.slow
def test_packages_in_a_zip_file(tmp_path, ask, usual):
    """peft without its metadata, and this package, which lists its patches."""
    path = zipped(tmp_path, "peft", "gemma4_compat")
    files = '{"files": [gemma4_compat.__file__, peft.__file__], "states"'
    code = "import peft" + STATES.replace('{"states"', files)
    layout = [path, ask, *links(tmp_path, without=["peft", "gemma4_compat"])]
    found = finds_in(layout, code)
    assert all(file.startswith(str(path)) for file in found.pop("files"))
    assert found["versions"] == {**usual["versions"], "peft": None}
    assert_the_probes_decide(found, usual)


@pytest.mark.slow
def test_packages_without_metadata(tmp_path, ask, usual):
    """As in a frozen application; transformers itself needs accelerate's metadata."""
    packages = ("transformers", "peft", "bitsandbytes")
    layout = links(tmp_path, without=[f"{name}-" for name in packages])
    code = f"""
import importlib.metadata
for name in {packages!r}:
    try:
        raise SystemExit(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
"""
    found = finds_in([ROOT, ask, *layout], code + STATES)
    assert found["versions"] == {**usual["versions"], **dict.fromkeys(packages)}
    assert_the_probes_decide(found, usual)


def assert_the_probes_decide(found, usual):
    """On unknown versions, probes find the bugs fixed of patches that are outside their gate."""
    assert found["spared"]
    states = {name: state for name, (state, _) in found["states"].items()}
    expected = {name: state for name, (state, _) in usual["states"].items()}
    others = {name: state for name, state in states.items() if state != expected[name]}
    assert {expected[name] for name in others} <= {"unaffected"}
    assert set(others.values()) <= {"fixed upstream"}


@pytest.mark.slow
def test_packages_without_sources(tmp_path, ask, usual):
    """Probes examine compiled code, so they need no sources."""
    for package in ("peft", "gemma4_compat"):
        without_sources(tmp_path, package)
    layout = [tmp_path, ask, *links(tmp_path, without=["peft", "gemma4_compat"])]
    found = finds_in(layout, STATES)
    assert found == usual


def test_a_package_without_metadata_has_an_unknown_version(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tells").mkdir()
    (tmp_path / "tells" / "__init__.py").write_text("__version__ = '1.2.3'\nraise ImportError")
    gate.installed_version.cache_clear()
    unknown = gate.evaluate(("tells<1.2.4",))
    assert unknown.outcome is gate.Outcome.UNDECIDED
    assert unknown.versions == {"tells": None}
    assert "installed: tells (unknown)" in unknown.reason
    assert "tells" not in sys.modules


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_read_only_installation(tmp_path_factory):
    """The package works without write permission; root runs this as another user."""
    folder = tmp_path_factory.mktemp("installed")
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    shutil.copytree(ROOT / "gemma4_compat", folder / "gemma4_compat",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    for name in ("wrapt", "packaging"):
        shutil.copytree(location(name), folder / name)
    for parent in (folder, *folder.parents[:3]):
        if user != os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    code = """
import os, sys, traceback
try:
    open(os.path.join(sys.path[1], "gemma4_compat", "x"), "w")
except OSError:
    import gemma4_compat
    print(gemma4_compat.__file__, len(gemma4_compat.status()))
"""
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-S", "-c"]
    options = {"capture_output": True, "text": True, "env": environ, "cwd": "/", "timeout": 60}
    drop = {} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}
    try:
        alive = subprocess.run([*command, "import decimal"], check=False, **options, **drop)
    except PermissionError:
        pytest.skip("another user may not run this interpreter")
    if alive.returncode:
        pytest.skip("another user cannot use this interpreter")
    result = subprocess.run([*command, code], check=False, **options, **drop)
    assert result.stderr == ""
    from gemma4_compat.patches import load

    expected = f"{folder}/gemma4_compat/__init__.py {len(load())}"
    assert result.stdout.strip() == expected
    assert not [*(folder / "gemma4_compat").rglob("__pycache__")]


# -- interpreters ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_isolated_optimized_interpreter(ask, usual):
    """Without asserts and PYTHONPATH, the patches work and the package's code does not warn.

    transformers cannot import Gemma 4 without docstrings (-OO).
    """
    code = f"""
import sys, warnings
sys.path[:0] = {[str(ask), str(ROOT), *sys.path]!r}
assert False
warnings.filterwarnings("error", module="gemma4_compat")
"""
    flags = ("-I", "-O", "-X", "frozen_modules=off", "-X", "importtime")
    assert finds(code + STATES, *flags) == usual


# -- late imports ----------------------------------------------------------------------------------

LATE = """
import json, sys, tempfile, warnings
folder, adapter, late, out = sys.argv[1:]
warnings.simplefilter("ignore")
if late == "False":
    import gemma4_compat
import torch
from accelerate import dispatch_model
from accelerate.utils.modeling import set_module_tensor_to_device as captured
from peft import PeftModel
from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

def load(**options):
    return Gemma4ForConditionalGeneration.from_pretrained(
        folder, device_map={"": "cpu"}, dtype=torch.bfloat16, **options
    ).eval()

def load_4bit():
    return load(quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["model.audio_tower", "lm_head"],
    ))

def split(model):
    layers = {f"model.language_model.layers.{i}": "disk" for i in (1, 2, 4)}
    device_map = {**layers, "model.vision_tower": "disk", "": "cpu"}
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=tempfile.mkdtemp())

def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 20)[None]).logits.float()

def attempt(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

whole, parted, whole_4bit, fresh_4bit = load(), split(load()), load_4bit(), load_4bit()
found = {"whole": logits(whole), "whole, 4-bit": logits(whole_4bit)}
attempt(logits, parted)
parted_4bit = attempt(split, load_4bit())
import gemma4_compat
import accelerate.utils.modeling
status = gemma4_compat.status()
assert captured is accelerate.utils.modeling.set_module_tensor_to_device
found["whole again"], found["parted"] = logits(whole), logits(parted)
found["whole again, 4-bit"] = logits(whole_4bit)
found["parted later, 4-bit"] = logits(split(load_4bit()))
found["adapter"] = logits(PeftModel.from_pretrained(parted, adapter))
# Not the model that has run: a forward repacks the weights on some CPUs, which is not exact.
found["adapter, 4-bit"] = logits(PeftModel.from_pretrained(fresh_4bit, adapter))
found["placed"] = sorted(n for n, p in parted.named_parameters() if p.is_meta and "lora" not in n)
if late == "True":
    found["parted, 4-bit"] = parted_4bit if isinstance(parted_4bit, str) else attempt(
        lambda: logits(PeftModel.from_pretrained(parted_4bit, adapter)))
    found["kept"] = [s.name for s in status if "still point to the original" in s.reason]
torch.save(found, out)
"""


@pytest.fixture
def late_and_early(tmp_path, ask, usual, model_dir, adapter_dir):
    """The logits of models that were built before, and after, the import of the package."""
    import torch

    (tmp_path / "late.py").write_text(LATE)
    found = []
    for late in (True, False):
        result = python(tmp_path / "late.py", model_dir, adapter_dir, str(late), tmp_path / "out")
        assert result.returncode == 0, result.stderr
        found.append(torch.load(tmp_path / "out"))
    return found


@pytest.mark.slow
def test_models_built_before_the_import(late_and_early):
    import torch

    late, early = late_and_early
    unreached = late.pop("parted, 4-bit")
    kept = late.pop("kept")
    assert late.keys() == early.keys()
    assert late.pop("placed") == early.pop("placed") != []
    for name, expected in early.items():
        assert torch.equal(late[name], expected), name
    for name, same in {
        "whole again": "whole",
        "parted": "whole",
        "whole again, 4-bit": "whole, 4-bit",
        "parted later, 4-bit": "whole, 4-bit",
    }.items():
        assert torch.equal(early[name], early[same]), name
    assert not torch.equal(early["adapter"], early["whole"])
    # Values that were lost before the import stay lost.
    if not isinstance(unreached, torch.Tensor):
        assert "before gemma4_compat was imported" in unreached or "_is_hf_initialized" in unreached
    # accelerate keeps the bound forward of a module that it hooks.
    assert "offloaded_pad_embedding" in kept
