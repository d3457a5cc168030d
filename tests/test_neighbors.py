"""Other packages that patch the same libraries, applied before and after this package.

Each runs in its own processes: without this package, before it and after it.  Packages that are not
installed are skipped.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

# Its results of other processes are cached in a worker.
pytestmark = pytest.mark.xdist_group("neighbors")

ROOT = Path(__file__).parents[1]
LIBRARIES = ("transformers", "accelerate", "peft", "bitsandbytes")


# -- the neighbors: what each changes as (owner, attribute), and what that is good for ------------


def nobody():
    return []


def nothing(changed):
    return None


def liger_kernel():
    """Its kernels need a GPU; its forward runs anywhere, and calls them only for a loss."""
    from liger_kernel.transformers import apply_liger_kernel_to_gemma4
    from transformers.models.gemma4 import modeling_gemma4

    apply_liger_kernel_to_gemma4(rms_norm=False, geglu=False)
    return [(modeling_gemma4.Gemma4ForConditionalGeneration, "forward")]


def is_ligers(changed):
    """Whether a new model would use the neighbor's patch."""
    (owner, name), *_ = changed
    return inspect.getmodule(getattr(owner, name)).__name__


def unsloth_zoo():
    """Its own __init__ needs a GPU; its changes to our targets do not."""
    (folder,) = importlib.util.find_spec("unsloth_zoo").submodule_search_locations
    for name in ("unsloth_zoo", "unsloth_zoo.temporary_patches"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(Path(folder).parent.joinpath(*name.split(".")))]
    from accelerate import Accelerator
    from bitsandbytes import functional
    from peft import PeftModel
    from transformers import PreTrainedModel
    from unsloth_zoo import fast_grad_params
    from unsloth_zoo.temporary_patches import bitsandbytes_large_tensors, moe_utils, mxfp4

    fast_grad_params._wrap_accelerator()
    bitsandbytes_large_tensors.patch_bitsandbytes_large_tensors()
    moe_utils._patch_peft_load_adapter_for_moe_layout()
    mxfp4.patch_save_pretrained_mxfp4()
    return [
        (Accelerator, "prepare_model"),
        (functional, "dequantize_4bit"),
        (PeftModel, "load_adapter"),
        (PreTrainedModel, "save_pretrained"),
    ]


def unsloth_works(changed):
    import torch
    from accelerate import Accelerator
    from bitsandbytes import functional
    from unsloth_zoo import fast_grad_params
    from unsloth_zoo.temporary_patches import bitsandbytes_large_tensors as large

    before = fast_grad_params._GEN[0]
    fast_grad_params._flag(torch.nn.Linear(1, 1))
    Accelerator(cpu=True).prepare_model(torch.nn.Linear(1, 1))
    generations = fast_grad_params._GEN[0] - before
    values = torch.linspace(-1, 1, 512).reshape(8, 64)
    packed, state = functional.quantize_4bit(values, quant_type="nf4")
    whole = functional.dequantize_4bit(packed, state)
    limits = large.BNB_INT32_ELEMENT_LIMIT, large._PIECE_ELEMENTS
    large.BNB_INT32_ELEMENT_LIMIT, large._PIECE_ELEMENTS = 64, 128
    pieces = functional.dequantize_4bit(packed, state)
    large.BNB_INT32_ELEMENT_LIMIT, large._PIECE_ELEMENTS = limits
    return [generations, torch.equal(whole, pieces), digest(whole)]


def compressed_tensors():
    """Each of its conversions patches AlignDevicesHook.init_hook, and reverts that."""
    importlib.import_module("compressed_tensors.offload.convert.to_accelerate")
    return []


def conversions(changed):
    import torch
    from accelerate.hooks import AlignDevicesHook
    from compressed_tensors.offload import from_accelerate, offload_module, to_accelerate

    before = vars(AlignDevicesHook)["init_hook"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    outputs = [model(torch.ones(1, 4))]
    offload_module(model[0], "cpu", "cpu")
    device_map = to_accelerate(model)
    assert vars(AlignDevicesHook)["init_hook"] is before
    hooks = [type(getattr(part, "_hf_hook", None)).__name__ for part in model]
    outputs.append(model(torch.ones(1, 4)))
    from_accelerate(model)
    outputs.append(model(torch.ones(1, 4)))
    assert all(torch.equal(outputs[0], output) for output in outputs)
    return [device_map, hooks]


def trl():
    importlib.import_module("trl").SFTTrainer  # noqa: B018  (loaded when asked for)
    return []


def hqq():
    importlib.import_module("hqq.core.quantize")
    return []


def optimum():
    importlib.import_module("optimum.quanto")
    return []


NEIGHBORS = {
    "nobody": (nobody, nothing),
    "liger_kernel": (liger_kernel, is_ligers),
    "unsloth_zoo": (unsloth_zoo, unsloth_works),
    "compressed_tensors": (compressed_tensors, conversions),
    "trl": (trl, nothing),
    "hqq": (hqq, nothing),
    "optimum": (optimum, nothing),
}


# -- the worker ------------------------------------------------------------------------------------


def live_with(name, order, model_dir, adapter_dir):
    apply, use = NEIGHBORS[name]
    if order != "after":
        changed = apply()
        theirs = [vars(owner)[attribute] for owner, attribute in changed]

    import gemma4_compat

    for library in LIBRARIES:
        importlib.import_module(library)
    early = gemma4_compat.status(import_targets=True)
    if order == "after":
        changed = apply()
        theirs = [vars(owner)[attribute] for owner, attribute in changed]
    slots = list(zip(changed, theirs, strict=True))
    functions = [
        (entry.target.owner, entry.target.name, entry.target.raw)
        for record in gemma4_compat._engine._records
        for entry in record.layer.entries
    ]
    found = {
        "states": {each.name: each.state.value for each in gemma4_compat.status()},
        "warned": [each.reason for each in early if each.state.value in ("failed", "drifted")],
        "in use": [
            vars(owner)[attribute] is value or (owner, attribute, value) in functions
            for (owner, attribute), value in slots
        ],
        "good for": use(changed),
        "model": digests(model_dir, adapter_dir),
    }
    over = [
        record.patch.name
        for record in gemma4_compat._engine._records
        if gemma4_compat._engine._stack.changed(record.layer)
    ]
    left = gemma4_compat.uninstall()
    found["covered"] = over
    found["not taken back"] = [each.name for each in left if each.state.value == "applied"]
    found["in place"] = [vars(owner)[attribute] is value for (owner, attribute), value in slots]
    found["good for, without us"] = use(changed)
    found["model, without us"] = digests(model_dir, adapter_dir)
    gemma4_compat.install()
    found["states again"] = {each.name: each.state.value for each in gemma4_compat.status()}
    return found


def digest(tensor):
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


def digests(model_dir, adapter_dir):
    """Digests of the model's outputs: plain, with an adapter, saved and loaded again."""
    from peft import PeftModel

    from tests.support import load_model, logits

    model = load_model(model_dir)
    found = [digest(each) for each in logits(model).values()]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found += [digest(each) for each in logits(load_model(folder)).values()]
    adapted = PeftModel.from_pretrained(model, adapter_dir)
    adapted.load_adapter(adapter_dir, "again")
    adapted.set_adapter("again")
    return found + [digest(each) for each in logits(adapted.eval()).values()]


# -- tests -----------------------------------------------------------------------------------------


@pytest.fixture
def life(model_dir, language_adapter_dir):
    """The results with a neighbor, applied before or after this package."""
    return functools.partial(_life, model_dir=str(model_dir), adapter_dir=str(language_adapter_dir))


@functools.cache
def _life(name, order, model_dir, adapter_dir):
    for library in LIBRARIES:
        pytest.importorskip(library)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GEMMA4_COMPAT")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    if order == "without":
        environ["GEMMA4_COMPAT"] = "0"
    arguments = (name, order, model_dir, adapter_dir)
    code = (
        f"import json, tests.test_neighbors as neighbors\n"
        f"print(json.dumps(neighbors.live_with(*{arguments})))"
    )
    with tempfile.TemporaryDirectory() as folder:  # unsloth_zoo writes to the working directory
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True,
            timeout=600, cwd=folder, env=environ, check=False,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", [name for name in NEIGHBORS if name != "nobody"])
def test_neighbor(life, name, order):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    alone, without, found = life("nobody", "before"), life(name, "without"), life(name, order)
    assert found["states"] == alone["states"]
    assert "applied" in found["states"].values()
    assert found["warned"] == []
    assert all(found["in use"])
    assert all(found["in place"]), "taken away with us"
    assert found["good for"] == found["good for, without us"] == without["good for"]
    assert found["model"] == found["model, without us"] == without["model"] == alone["model"]
    # A replacement that another package has patched over stays, and so do those that it needs.
    assert set(found["covered"]) <= set(found["not taken back"])
    patched_over = name in ("unsloth_zoo", "liger_kernel") and order == "after"
    assert bool(found["covered"]) == bool(found["not taken back"]) == patched_over
    assert found["states again"] == alone["states"]
