"""GPUs that do not compute in bfloat16 (T4, V100): what ``plan`` prints trains and generates.

No such GPU was at hand: a CPU shows what the dtypes do, with weights scaled as the models need it.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gemma4_compat.cli import main
from gemma4_compat.errors import InputError
from gemma4_compat.model.meta import checkpointing
from gemma4_compat.patches.training import fp16_training_notice
from gemma4_compat.planning import plan
from gemma4_compat.planning.gpus import _CARDS, _WITHOUT_BFLOAT16, parse_gpu
from tests.support import INPUTS
from tests.test_docs import ON_CPU, blocks, hub  # noqa: F401
from tests.test_plan import pasted

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "t4.ipynb"
#: the most that gradients may be off, in terms of those of a run in bfloat16
LIMIT = 1.25
SCALE = 1024.0  # that of the loss, as by GradScaler
#: weights of the decoder by the end of their names, and by what they are multiplied
SMALL = {"layer_scalar": 1e-3}
SMALL |= dict.fromkeys(("input_layernorm.weight", "pre_feedforward_layernorm.weight"), 4)
LARGE = {"post_attention_layernorm.weight": 2e5, "post_feedforward_layernorm.weight": 2e5}
LARGE |= {"post_per_layer_input_norm.weight": 2e5, "per_layer_input_gate.weight": 1e-5}
#: what differs in the code that was printed before, in a run in bfloat16, and in the reference
BEFORE = {"torch.bfloat16": "torch.float16", '"float32"': '"float16"'}
BFLOAT16 = {'"float32"': '"bfloat16"'}
FLOAT32 = {"torch.bfloat16": "torch.float32"}


@pytest.fixture(scope="module", params=[SMALL, LARGE], ids=["small", "large"])
def scaled(request, model_dir, tmp_path_factory):
    """A checkpoint whose hidden states are small, or beyond the largest float16."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("scaled") / ("large" if request.param is LARGE else "small")
    shutil.copytree(model_dir, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        for end, factor in request.param.items():
            if ".language_model." in name and name.endswith(end):
                tensors[name] = (tensor.float() * factor).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@cache
def planned(folder, train):
    return plan(folder, "T4", context=16, train=train, rank=4 if train else 16)


def printed(folder, changes=(), train=False):
    """The model that the printed code loads, after these changes of the code."""
    code = planned(folder, train).code
    for text, other in dict(changes).items():
        assert text in code
        code = code.replace(text, other)
    return pasted(SimpleNamespace(code=code))


@pytest.fixture(scope="module")
def gradients(scaled):
    """A function: the gradients of adapters by kind of input, as float32, in one tensor."""

    @cache
    def gradients(changes=(), fp16=False, adapters=2):
        model = printed(scaled, changes, train=True).train()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found = {kind: [] for kind in INPUTS}
        for seed in range(adapters):
            generator = torch.Generator().manual_seed(seed)
            for name, each in trained.items():
                spread = 0.02 if "lora_B" in name else each.shape[1] ** -0.5
                each.data.copy_(torch.randn(each.shape, generator=generator) * spread)
            for kind, make in INPUTS.items():
                model.zero_grad()
                inputs = make(model.config)
                with torch.autocast("cpu", torch.float16, enabled=fp16):
                    loss = model(**inputs, labels=inputs["input_ids"]).loss
                (loss * (SCALE if fp16 else 1)).backward()
                found[kind] += [each.grad.flatten().float() for each in trained.values()]
        return {kind: torch.cat(each) for kind, each in found.items()}

    return gradients


def changed(changes):
    return tuple(changes.items())


def test_printed_code_trains(gradients, caplog):
    """Gradients are finite, no further from float32 than in bfloat16, and there is no notice."""
    fp16_training_notice._warn.cache_clear()
    found, coarse = gradients(), gradients(changed(BFLOAT16))
    for kind, exact in gradients(changed(FLOAT32)).items():
        assert exact.norm() > 0
        error, limit = ((each[kind] - exact).norm() for each in (found, coarse))
        assert error <= LIMIT * limit, f"{kind}: {error:.3g}, in bfloat16 {limit:.3g}"
    assert not [each for each in caplog.records if each.name == fp16_training_notice.__name__]


def test_float16_does_not_train(gradients):
    """What the other tests would not show if the weights were not scaled as they are."""
    for found in gradients(changed(BEFORE), fp16=True, adapters=1).values():
        assert not found.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("scaled", [LARGE], ids=["large"], indirect=True)
def test_printed_code_generates(scaled):
    """Logits are no further from float32 than in bfloat16; in float16 they are NaN."""

    def logits(changes=()):
        model = printed(scaled, changes).eval()
        model.generate(**INPUTS["text"](model.config), max_new_tokens=4)
        inputs = [INPUTS[kind](model.config) for kind in ("text", "image")]
        return torch.cat([model(**each).logits.float()[0] for each in inputs])

    found, coarse, exact, before = map(logits, ((), BFLOAT16, FLOAT32, BEFORE))
    assert (found - exact).norm() <= LIMIT * (coarse - exact).norm()
    assert before.isnan().any()


def test_what_is_printed(model_dir):
    """Nothing is in float16, and other cards get bfloat16 alone."""
    cards = [each for names in _CARDS.values() for each in names.split(", ")]
    for name in (each for each in cards if each.startswith(_WITHOUT_BFLOAT16)):
        with suppress(InputError):  # there are several of this name
            assert not parse_gpu(name).bfloat16
    for gpu, dtype in (("T4", "float32"), ("RTX 4070", "bfloat16")):
        found = planned(model_dir, True) if gpu == "T4" else plan(model_dir, gpu, context=16)
        assert f'bnb_4bit_compute_dtype="{dtype}"' in found.code
        assert "dtype=torch.bfloat16" in found.code
        assert (found.dtype, found.compute) == ("bfloat16", dtype)
        assert not re.search(r"\bfloat16\b", found.code.partition("# Train")[0])
        assert ("fp16=False" in found.code) is (gpu == "T4")
        assert ("does not compute in bfloat16" in str(found)) is (gpu == "T4")


def test_the_memory_of_all_scores(model_dir):
    """No fused kernel of PyTorch takes bfloat16 on such a GPU."""
    tokens, taken = 1024, []
    for gpu in ("T4", "14.7GiB"):
        found = plan(model_dir, gpu, context=tokens, train=True, rank=4)
        taken += [found.bytes_of("activations")]
    assert taken[0] - taken[1] > 2 * tokens**2 * 4  # of two heads, in float32


# -- what users read ------------------------------------------------------------------------------


def cells():
    read = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(each["source"]) for each in read if each["cell_type"] == "code"]


def named(code):
    """The code with the method that the installed transformers has."""
    return re.sub(r"\w+_checkpointing_enable", checkpointing(), code)


def test_the_notebook_loads_as_planned(model_dir):
    code = planned(model_dir, True).code.replace("r=4,", "r=16,")
    assert code.replace(str(model_dir), "google/gemma-4-E2B-it") in map(named, cells())


def test_the_recipe_loads_as_planned(model_dir):
    recipe = "\n".join(blocks("docs/recipes.md", "python"))
    config = re.search(r"quantization(_t4 = .*?^\))", recipe, re.DOTALL | re.MULTILINE)[1]
    assert config.replace("_t4", "quantization", 1) in planned(model_dir, True).code


def test_the_notebook_runs(hub, monkeypatch, tmp_path, capsys, pristine):  # noqa: F811
    """Its cells in order, with a tiny model in place of E2B; installing is left out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "google").mkdir()
    (tmp_path / "google" / "gemma-4-E2B-it").symlink_to(hub / "google" / "gemma-4-E4B-it")
    commands, defined = [], {}
    for code in cells():
        for command in re.findall(r"^!gemma4-compat (.+)$", code, re.MULTILINE):
            commands += [main(command.split())]
        code = re.sub(r"^[!%].*$", "", named(code), flags=re.MULTILINE)
        for text, other in ON_CPU.items():
            code = code.replace(text, other)
        code = code.replace("\n    llm_int8_enable_fp32_cpu_offload=True,", "")
        exec(compile(code, "<cell>", "exec"), defined)
    assert commands == [0]
    assert "fits on a GPU of 14.70 GiB" in capsys.readouterr().out
    assert "bfloat16" in str(defined["model"].dtype)
    losses = [each["loss"] for each in defined["trainer"].state.log_history if "loss" in each]
    norms = [each["grad_norm"] for each in defined["trainer"].state.log_history if "loss" in each]
    assert len(losses) == 4
    assert all(0 < each < float("inf") for each in losses + norms)
    assert defined["output"].shape[1] > defined["inputs"]["input_ids"].shape[1]
    assert (tmp_path / "my-lora" / "adapter_model.safetensors").is_file()
