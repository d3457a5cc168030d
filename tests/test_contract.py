"""The rules that every patch keeps towards the libraries; with the real ones, in fresh processes.

Each worker below runs in its own process, once for all patches, and prints its results.
"""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

# Its results of other processes are cached in a worker.
pytestmark = pytest.mark.xdist_group("contract")

ROOT = Path(__file__).parents[1]
#: the package beside the tests, or the installed one
PACKAGE = Path(importlib.util.find_spec("gemma4_compat").origin).parent
LIBRARIES = ("transformers", "accelerate", "peft", "bitsandbytes")
NAMES = sorted(p.stem for p in (PACKAGE / "patches").glob("*/[a-z]*.py"))
ENVIRONMENT = {name: f"GEMMA4_COMPAT_{name.upper()}" for name in NAMES}


# -- workers: nothing of gemma4_compat is imported at the top of this file -------------------------


def load_libraries():
    """Import the libraries, and all target modules that these releases have."""
    for name in (*LIBRARIES, *json.loads(os.environ["CONTRACT_TARGETS"])):
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)


def states():
    import gemma4_compat

    return {s.name: [s.state.value, s.reason] for s in gemma4_compat.status()}


def owners():
    """Every module and class of the libraries, by name and in order."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or not inspect.ismodule(module):
            continue
        found[name] = module
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                found[f"{name}:{value.__qualname__}"] = value
    return found


def snapshot():
    """Each owner and its attributes: of these, identities only, as a patch replaces references."""
    return {
        name: (owner, {attribute: id(value) for attribute, value in vars(owner).items()})
        for name, owner in owners().items()
    }


def changes(before):
    """The attributes that differ now, except modules that were imported since."""
    found = [name for name, (each, _) in before.items() if sys.modules.get(name, each) is not each]
    for owner, (each, attributes) in before.items():
        after = vars(each)
        # Nearly all are the same, and each patch alone is compared with all of them.
        if [*after] == [*attributes] and [*map(id, after.values())] == [*attributes.values()]:
            continue
        for name, identity in attributes.items():
            if id(after.get(name)) != identity and not name.startswith("__"):
                found.append(f"{owner}.{name}")
        new = [name for name in after if name not in attributes]
        found += [f"{owner}.{name}" for name in new if not inspect.ismodule(after[name])]
        kept = [name for name in after if name in attributes]
        if kept != list(attributes):
            found.append(f"{owner} (order)")
    return found


def leftovers():
    """All functions of this package in the libraries."""
    ours = str(PACKAGE)
    found = []
    for owner, each in owners().items():
        for name, value in vars(each).items():
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, property):
                value = value.fget
            if type(value) is type(leftovers) and value.__code__.co_filename.startswith(ours):
                found.append(f"{owner}.{name}")
    return found


def parameters(function):
    """What a function itself says of its parameters, without ``functools.wraps``."""
    code = getattr(function, "__code__", None)  # other libraries' wrappers have none
    if code is None:
        return None
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    defaults = function.__defaults__, function.__kwdefaults__
    return code.co_argcount, code.co_varnames[:count], defaults


def functions(engine):
    import pickle

    found = {}
    for record in engine._records:
        name = record.patch.name
        for entry in record.layer.entries:
            owner, attribute, _ = entry.target
            new = getattr(owner, attribute)
            static = inspect.getattr_static(owner, attribute)
            is_property = isinstance(static, property)
            in_cell = type(owner).__name__ == "cell"
            new = static.fget if is_property else new
            bound = inspect.ismethod(new)
            original = entry.target.raw.__get__(None, owner) if bound else entry.original
            where = original.__module__, original.__qualname__
            if entry.before is not entry.target.raw:  # it was inherited, and is now the class's own
                where = owner.__module__, f"{owner.__qualname__}.{attribute}"
            found.setdefault(name, []).append(
                {
                    "target": str(entry),
                    "signature": inspect.signature(new) == inspect.signature(original),
                    "parameters": parameters(entry.replacement) == parameters(entry.original),
                    "name": (new.__name__, new.__doc__) == (original.__name__, original.__doc__),
                    "where": (new.__module__, new.__qualname__) == where,
                    "descriptor": in_cell or type(static) is type(entry.target.raw),
                    "plain": type(entry.replacement) is type(functions),
                    # A property's getter, and what a closure holds, cannot be reached by its name.
                    "pickle": is_property or in_cell or pickle.loads(pickle.dumps(new)) == new,
                }
            )
    return found


def shim_first():
    import logging

    import gemma4_compat

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logging.getLogger("gemma4_compat").addHandler(handler)
    logging.getLogger("gemma4_compat").setLevel(logging.INFO)
    load_libraries()
    gemma4_compat.status(import_targets=True)
    found = {"states": states(), "patched": leftovers()}
    gemma4_compat.install()
    gemma4_compat.install()
    found["twice"] = leftovers()
    found["functions"] = functions(gemma4_compat._engine)
    found["log"] = [*records]
    found["replacements"] = {}
    for record in gemma4_compat._engine._records:
        if record.state.value == "applied":
            targets = found["replacements"].setdefault(record.patch.name, [])
            targets += {str(r) for r in record.layer.replacements} - {*targets}
    gemma4_compat.uninstall()
    found["uninstalled"] = states()
    found["leftovers"] = leftovers()
    found["behaviors"] = behaviors()  # here, as another process would import the same
    return found


def libraries_first():
    import gc

    load_libraries()
    before = snapshot()
    import gemma4_compat

    found = {"states": states(), "patched": leftovers(), "alone": {}}
    gemma4_compat.uninstall()
    found["changes"] = changes(before)
    gc.freeze()  # else each installation looks at all objects; nothing asks here what it found
    for name, patch in _patches().items():
        gemma4_compat.install(name, *patch.requires)
        gemma4_compat.uninstall(name, *patch.requires)
        found["alone"][name] = changes(before)
    gc.unfreeze()
    gemma4_compat.install()
    for name in [
        each.name for each in gemma4_compat.status()
    ]:  # patches below others in a slot first
        gemma4_compat.uninstall(name)
    found["one by one"] = changes(before)
    gemma4_compat.install()
    found["again"] = [states(), leftovers()]
    for name in [name for name in sys.modules if name.partition(".")[0] == "gemma4_compat"]:
        del sys.modules[name]
    importlib.import_module("gemma4_compat")
    found["imported anew"] = [states(), leftovers()]
    sys.modules["gemma4_compat"].uninstall()
    found["all gone"] = changes(before)
    return found


def switched_off():
    import gemma4_compat

    load_libraries()
    gemma4_compat.install()
    return {"states": states(), "leftovers": leftovers()}


def upside_down():
    """The states, and the outputs of models, with the patches applied in either order."""
    import gc
    import logging
    import tempfile

    import gemma4_compat
    from gemma4_compat.engine.core import Engine
    from gemma4_compat.engine.switches import Switches
    from gemma4_compat.patches import groups, load

    load_libraries()
    gemma4_compat.uninstall()
    switches = Switches("GEMMA4_COMPAT", asked=groups()["fast"])
    logger = logging.getLogger("gemma4_compat")
    found = {}
    for order, patches in (("forwards", load()), ("backwards", [*reversed(load())])):
        gc.collect()  # models of the other order hold replaced functions
        status = Engine(patches, switches, logger).install()
        with tempfile.TemporaryDirectory() as folder:
            found[order] = {
                "names": [each.name for each in status],
                "states": {s.name: [s.state.value, s.reason] for s in status},
                "computed": _computed(Path(folder)),
                **{use: re.sub(r" at 0x[0-9a-f]+", "", str(_outcome(use))) for use in USES},
                # Last: computing imports more modules that hold patched objects.
                "patched": sorted(leftovers()),
            }
    return found


def _computed(folder):
    """Outputs of a partly offloaded 4-bit model with an adapter, also saved and loaded again."""
    from peft import PeftModel

    from gemma4_compat.tiny import build_adapter, build_checkpoint
    from tests.support import load_model, logits, split
    from tests.test_neighbors import digest, digests

    model_dir = build_checkpoint(folder / "model")
    adapter_dir = build_adapter(folder / "adapter", model_dir)
    found = digests(model_dir, adapter_dir)
    model = split(load_model(model_dir, "nf4-nested"), folder / "offloaded")
    model = PeftModel.from_pretrained(model, adapter_dir).eval()
    found += [digest(each) for each in logits(model).values()]
    model.save_pretrained(folder / "saved")
    again = PeftModel.from_pretrained(load_model(model_dir), folder / "saved").eval()
    return found + [digest(each) for each in logits(again).values()]


def _outcome(use):
    try:
        return USES[use]()
    except Exception as error:
        # Without the traceback that torch.compile adds: it contains our functions.
        message = str(error).partition("\n\nfrom user code")[0]
        return f"{type(error).__name__}: {message}"


def behaviors():
    """The outcomes of ordinary use of the patched classes, with and without the patches."""
    import gemma4_compat

    found = {}
    for mode in ("patched", "unpatched"):
        gemma4_compat.install() if mode == "patched" else gemma4_compat.uninstall()
        for name in USES:
            text = re.sub(r" at 0x[0-9a-f]+", "", str(_outcome(name)))
            found.setdefault(name, {})[mode] = text
    return found


def _linear4bit():
    import bitsandbytes
    import torch

    torch.manual_seed(0)
    module = bitsandbytes.nn.Linear4bit(128, 128, bias=False, quant_type="nf4")
    module.weight.data.copy_(torch.randn(128, 128))
    return module.to("cpu")


def _lora(layer):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(128, 4))
    config = LoraConfig(target_modules=["0"], init_lora_weights=False)
    return get_peft_model(model, config).eval()


def _linear():
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(128, 128)


def _x():
    import torch

    return torch.linspace(-1, 1, 256).reshape(2, 128)


def _copies(make, use):
    """deepcopy and pickle keep the class and its outputs."""
    import copy
    import pickle

    original = make()
    found = []
    for way in (copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))):
        try:
            again = way(original)
            found.append(f"{type(again).__qualname__} {use(again)}")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _forward(module):
    import torch

    with torch.no_grad():
        return [round(value, 4) for value in module(_x()).flatten()[:8].tolist()]


def _quant_state(weight):
    state = weight.quant_state
    return [type(state).__qualname__, tuple(state.shape), float(state.absmax.float().sum())]


def _hooked():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    hook = AlignDevicesHook(execution_device="cpu", offload=True)
    return add_hook_to_module(_linear(), hook)


def _compiled(make):
    """Compiled without a graph break equals eager."""
    import torch

    torch._dynamo.reset()
    module = make()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.no_grad():
        return f"equals eager: {torch.equal(compiled(_x()), module(_x()))} {_forward(module)}"


USES = {
    "Params4bit copies": lambda: _copies(lambda: _linear4bit().weight, _quant_state),
    "Linear4bit copies": lambda: _copies(_linear4bit, _forward),
    "hook copies": lambda: _copies(lambda: _hooked()._hf_hook, lambda h: h.execution_device),
    "hooked module copies": lambda: _copies(_hooked, _forward),
    "LoRA copies": lambda: _copies(lambda: _lora(_linear()), _forward),
    "4-bit LoRA copies": lambda: _copies(lambda: _lora(_linear4bit()), _forward),
    "Linear4bit compiled": lambda: _compiled(_linear4bit),
    "LoRA compiled": lambda: _compiled(lambda: _lora(_linear())),
    "4-bit LoRA compiled": lambda: _compiled(lambda: _lora(_linear4bit())),
    "4-bit state dict": lambda: sorted(_linear4bit().state_dict()),
}


# -- tests -----------------------------------------------------------------------------------------


def worker(name, **environ):
    """The results of a worker, which runs once."""
    found = _run(name, **environ)
    assert isinstance(found, dict), found
    return found


@functools.cache
def _run(name, **environ):
    targets = {r.module: 0 for patch in _patches().values() for r in patch.targets}
    environ["CONTRACT_TARGETS"] = json.dumps([*targets])
    found = {k: v for k, v in os.environ.items() if not k.startswith("GEMMA4_COMPAT")}
    found["GEMMA4_COMPAT_FAST"] = "1"  # all patches
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH")]))
    code = (
        f"import json, tests.test_contract as contract\nfound = contract.{name}()\n"
        "print(json.dumps(found))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True,
        timeout=600, cwd=ROOT, env={**found, **environ}, check=False,
    )  # fmt: skip
    return result.stderr if result.returncode else json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def libraries():
    for name in LIBRARIES:
        pytest.importorskip(name)


@pytest.fixture(params=NAMES)
def affected(request, libraries):
    """The name of a patch whose gate contains the installed releases."""
    from gemma4_compat.engine.gate import Outcome
    from gemma4_compat.patches import gate

    found = gate(_patches()[request.param])
    if found.outcome not in (Outcome.INSIDE, Outcome.UNDECIDED):
        pytest.skip(f"{found.outcome.value}: {found.reason}")
    return request.param


@functools.cache
def _modules():
    from gemma4_compat.patches import topics

    modules = [module for modules in topics().values() for module in modules]
    return {module.__name__.rpartition(".")[2]: module for module in modules}


def _patches():
    from gemma4_compat.patches import load

    return {patch.name: patch for patch in load()}


def _probe_of(patch, unit):
    return unit.probe_function or patch.probe_function


def test_one_worker_runs_this_file(request):
    if request.config.getoption("loadgroup", default=False):
        node = request.node.nodeid
        assert node.endswith("@contract"), "with this pytest, this pytest-xdist ignores groups"


def test_registry():
    assert list(_patches()) == NAMES
    assert "strict" not in NAMES, "GEMMA4_COMPAT_STRICT means something else"


@pytest.mark.parametrize("name", NAMES)
def test_definition(name):
    from gemma4_compat.engine.switches import read

    patch = _patches()[name]
    module = _modules()[name]
    for unit in patch.units:
        assert _probe_of(patch, unit) is not None, "no probe"
        assert unit.replacements
    assert len(module.__doc__.strip().splitlines()) > 3
    assert patch.symptom
    assert bool(patch.links) != bool(patch.unreported)
    read_as = read("GEMMA4_COMPAT", {name: ()}, logging.getLogger(), {ENVIRONMENT[name]: "0"})
    assert read_as.off == {name: f"{ENVIRONMENT[name]}=0"}
    tests = (ROOT / "tests" / "patches" / f"test_{name}.py").read_text()
    assert re.search(rf'\.regression\(\s*"{name}"', tests), "no regression test"


def test_patches_that_change_right_results():
    """README and page name all that an import puts in place, and no other; so do tests on a GPU."""
    from gemma4_compat.engine import Kind
    from tests.exact import NAMED

    named = {n: p for n, p in _patches().items() if p.differs and p.kind is not Kind.FAST}
    readme = (ROOT / "README.md").read_text().partition("**What it does not change.**")[2]
    assert {*re.findall("`(.+?)`", readme.partition("\n\n")[0])} == {*named}
    page = (ROOT / "docs" / "how-it-works.md").read_text().partition("## Bits")[2]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+) \|$", page.partition("## States")[0], re.M)
    assert rows == [(n, named[n].kind.value, named[n].differs) for n in sorted(named)]
    # Pixels were wrong without that patch.
    assert {*NAMED} - {"vision_uint8_pixels"} <= {*named}


@pytest.mark.parametrize("name", NAMES)
def test_probe_can_end_the_patch(name):
    """Each probe has a case that returns ``fixed``."""
    patch = _patches()[name]
    for unit in patch.units:
        probe = _probe_of(patch, unit)
        own, names = probe.__globals__, probe.__code__.co_names
        helpers = [own[n].__code__ for n in names if inspect.isfunction(own.get(n))]
        assert any("fixed" in each.co_names for each in (probe.__code__, *helpers))


@pytest.mark.parametrize("name", NAMES)
def test_probe_imports_no_further_library(name):
    """It runs while a user's program imports its targets, and perhaps a part of another library."""
    patch = _patches()[name]
    probes = [_probe_of(patch, unit) for unit in patch.units]
    imported = {
        each.argval.partition(".")[0]
        for probe in probes
        for each in dis.get_instructions(probe)
        if each.opname == "IMPORT_NAME"
    }
    targets = {each.module.partition(".")[0] for each in patch.targets}
    by_targets = {"peft": {"transformers", "accelerate"}, "transformers": {"accelerate"}}
    there = targets.union(*(by_targets.get(each, ()) for each in targets))
    assert imported & {*LIBRARIES} <= there


def test_canary(affected):
    """Inside its gate, every patch finds its targets."""
    state, reason = worker("shim_first")["states"][affected]
    assert state in ("applied", "fixed upstream"), f"{affected} {state}: {reason}"
    if state == "applied":
        assert reason == "", "nothing takes references before the libraries are patched"
        found = {each["target"] for each in worker("shim_first")["functions"][affected]}
        assert found == {*worker("shim_first")["replacements"][affected]}


def test_import_order_does_not_matter(affected):
    early, late = worker("shim_first"), worker("libraries_first")
    assert early["states"][affected] == late["states"][affected]


def test_the_same_is_patched_in_either_order(libraries):
    early, late = worker("shim_first"), worker("libraries_first")
    assert sorted(early["patched"]) == sorted(late["patched"])


@pytest.mark.slow
def test_stacking_order_does_not_matter(libraries):
    """A patch names the patches that it needs in ``requires``; their order has no effect."""
    found = worker("upside_down")
    forwards, backwards = found["forwards"], found["backwards"]
    assert forwards.pop("names") == backwards.pop("names")[::-1] == NAMES
    assert len(forwards["computed"]) > 9
    assert backwards == forwards


@pytest.mark.slow
def test_blocked_where_a_required_patch_is_off(libraries):
    """Each required patch is switched off once; only patches that require it change state."""
    usual = worker("shim_first")["states"]
    for required in {each for patch in _patches().values() for each in patch.requires}:
        found = worker("switched_off", **{ENVIRONMENT[required]: "0"})["states"]
        off = {required: f"disabled by {ENVIRONMENT[required]}=0"}
        reasons = dict.fromkeys(NAMES, "")
        for _ in NAMES:  # until it reached the patches that require those that require it
            for name, patch in _patches().items():
                due = [
                    f"needs {each}, which is {off[each]}" for each in patch.requires if each in off
                ]
                if due:
                    off[name], reasons[name] = off.get(name, "blocked"), "; ".join(due)
        for name in found.keys() - {required}:
            # A probe runs only if the required patches are on.
            blocked = reasons[name] and usual[name][0] in ("applied", "fixed upstream")
            assert found[name] == (["blocked", reasons[name]] if blocked else usual[name])


def test_unaffected_patches_change_nothing(libraries):
    found = worker("shim_first")
    applied = {name for name, (state, _) in found["states"].items() if state == "applied"}
    assert set(found["functions"]) == applied
    assert bool(found["patched"]) == bool(applied)


def test_installed_twice(libraries):
    found = worker("shim_first")
    assert found["twice"] == found["patched"]


def test_one_line_a_patch_and_no_warning(libraries):
    found = worker("shim_first")
    applied = {name for name, (state, _) in found["states"].items() if state == "applied"}
    lines = [line for _, line in found["log"]]
    assert len({*lines}) == len(lines)
    assert {level for level, _ in found["log"]} == {"INFO"}
    assert {line.partition(" (")[0].removesuffix(": applied") for line in lines} == applied


def test_functions_look_like_the_originals(affected):
    for found in worker("shim_first")["functions"].get(affected, []):
        assert all(found.values()), found


def test_uninstalled(affected):
    assert worker("shim_first")["uninstalled"][affected] == ["disabled", "uninstall()"]
    assert worker("libraries_first")["alone"][affected] == []


def test_nothing_is_left(libraries):
    assert worker("shim_first")["leftovers"] == []
    found = worker("libraries_first")
    assert found["changes"] == found["one by one"] == found["all gone"] == []


def test_installed_again(libraries):
    found = worker("libraries_first")
    assert found["again"] == [found["states"], found["patched"]]
    assert found["imported anew"] == [found["states"], found["patched"]]


@pytest.mark.slow
@pytest.mark.parametrize("variables", [("GEMMA4_COMPAT",), tuple(ENVIRONMENT.values())])
def test_switched_off(libraries, variables):
    found = worker("switched_off", **dict.fromkeys(variables, "0"))
    assert found["leftovers"] == []
    for name, (state, reason) in found["states"].items():
        assert state == "disabled"
        assert reason in ("GEMMA4_COMPAT=0", f"{ENVIRONMENT[name]}=0")


@pytest.mark.parametrize("use", USES)
def test_ordinary_use_is_as_without_patches(libraries, use):
    outcome = worker("shim_first")["behaviors"][use]
    assert outcome["patched"] == outcome["unpatched"]
    if "compiled" in use:
        assert "equals eager: False" not in outcome["patched"]
