"""``inspect_model`` on models that the real libraries loaded, split, adapted and damaged."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil

import pytest
import torch

import gemma4_compat
from gemma4_compat.inspection import inspect_model
from gemma4_compat.model import meta, parts
from gemma4_compat.model.hooks import offload_hook
from gemma4_compat.tiny import TOWERS
from tests.support import (
    adapter_parameters,
    load_model,
    new_model,
    offloaded,
    quantization,
    split,
)
from tests.test_sizes import held

bnb = pytest.importorskip("bitsandbytes")

INNER_TOWERS = r".*(vision_tower|audio_tower).*(q_proj|v_proj)\.linear"


@pytest.fixture(autouse=True)
def _everything_armed(pristine):
    pass


def part(found, name):
    return next(part for part in found.parts if part.name == name)


def snapshot(model):
    """The state of a model that an inspection might change."""
    tensors = {
        name: (id(each), each.device, each.dtype, None if each.is_meta else each.data_ptr())
        for name, each in [*model.named_parameters(), *model.named_buffers()]
    }
    states = {
        name: {key: id(value) for key, value in vars(each.quant_state).items()}
        for name, each in model.named_parameters()
        if getattr(each, "quant_state", None) is not None
    }
    hooks = {n: id(m._hf_hook) for n, m in model.named_modules() if hasattr(m, "_hf_hook")}
    return tensors, states, hooks, model.training


def find_bnb_meta_quant_state(model):
    """The diagnostic that users wrote themselves."""
    bad = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        quant_state = getattr(weight, "quant_state", None)
        if quant_state is None:
            continue
        for state in (quant_state, getattr(quant_state, "state2", None)):
            for attr in ("absmax", "code", "offset"):
                value = getattr(state, attr, None)
                if value is not None and getattr(value, "is_meta", False):
                    bad.append(name)
    return list(dict.fromkeys(bad))


# -- whole models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "nf4", "nf4-nested", "int8"])
def test_every_byte_of_a_whole_model(model_dir, kind):
    model = new_model(model_dir, kind)
    before = snapshot(model)
    found = inspect_model(model)
    assert snapshot(model) == before
    assert found.ok
    assert found.bytes == {"cpu": sum(held(model).values())}
    assert found.input_device == "cpu"
    assert found.offloaded == {}
    assert found.adapters == {}
    kinds = {"int8": "8-bit", None: None}
    assert (found.quantization or "None").startswith(str(kinds.get(kind, "4-bit")))


def test_linear_layers_are_counted(model_dir):
    found = inspect_model(new_model(model_dir, "nf4"))
    audio = part(found, parts.AUDIO).linear
    assert audio["bf16"] > audio["4-bit"] == 1  # the config of the test skips the others
    assert set(part(found, parts.VISION).linear) == {"4-bit"}
    model = new_model(model_dir)
    linear = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    counted = sum(n for each in inspect_model(model).parts for n in each.linear.values())
    assert counted == linear - 1  # lm_head's weight is tied to the embeddings


@pytest.mark.parametrize("kind", [None, "nf4-nested", "int8"])
def test_experts_are_counted(moe_dir, kind):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        moe_dir, quantization_config=quantization(kind), dtype=torch.bfloat16, device_map="cpu"
    )
    found = inspect_model(model)
    assert found.ok
    assert found.bytes == {"cpu": sum(held(model).values())}
    four_bit = kind == "nf4-nested"
    assert part(found, parts.LAYERS).linear["4-bit experts" if four_bit else "bf16 experts"] == 3


# -- split models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "nf4-nested"])
def test_a_split_model(model_dir, tmp_path, kind):
    model = split(new_model(model_dir, kind), tmp_path)
    before = snapshot(model)
    shutil.rmtree(tmp_path)  # so that nothing can be read
    found = inspect_model(model)
    assert snapshot(model) == before
    assert found.ok
    on_disk = sum(p.numel() * p.element_size() for p in model.parameters() if p.is_meta)
    assert found.bytes["disk"] == on_disk
    modules = {name.rpartition(".")[0] for name in offloaded(model)}
    assert found.offloaded == {"disk to cpu": len(modules)}
    for tower in (parts.VISION, parts.AUDIO):
        assert part(found, tower).weights["disk"]
        assert part(found, tower).computes_on == ("cpu",)
    assert set(part(found, parts.LAYERS).weights) == {"cpu"}


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_model_that_is_offloaded_as_a_whole(model_dir, tmp_path, where):
    """accelerate offloads, without a device map."""
    import accelerate

    model = new_model(model_dir)
    whole = inspect_model(model).bytes["cpu"]
    head = model.lm_head.weight.nbytes
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    found = inspect_model(model)
    assert found.ok
    assert set(found.offloaded) == {f"{where} to cpu"}
    # accelerate writes tied weights twice.
    assert sum(found.bytes.values()) == whole + (head if where == "disk" else 0)
    assert found.input_device == "cpu"


def test_a_second_hook_hides_nothing(model_dir, tmp_path):
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = split(new_model(model_dir), tmp_path)
    before = inspect_model(model)
    for module in model.modules():
        if offload_hook(module) is not None:
            add_hook_to_module(module, ModelHook(), append=True)
    assert inspect_model(model) == before


# -- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "nf4-nested"])
def test_adapters_of_a_split_model(model_dir, adapter_dir, second_adapter_dir, tmp_path, kind):
    from peft import PeftModel

    model = split(new_model(model_dir, kind), tmp_path)
    base = inspect_model(model)
    model = PeftModel.from_pretrained(model, adapter_dir, adapter_name="first")
    model.load_adapter(second_adapter_dir, adapter_name="second")
    before = snapshot(model)
    found = inspect_model(model)
    assert snapshot(model) == before
    assert found.ok
    assert list(found.adapters) == ["first", "second"]
    assert found.active == ("first",)
    first, second = found.adapters.values()
    assert set(first) == {parts.LAYERS, parts.VISION, parts.AUDIO}
    assert {device for by_device in first.values() for device in by_device} == {"cpu"}
    sizes_of = [p.numel() * p.element_size() for p in adapter_parameters(model).values()]
    told = sum(n for each in (first, second) for d in each.values() for n in d.values())
    assert told == sum(sizes_of)
    # The report on the base model does not change.
    assert found.parts == base.parts
    assert (found.base, found.model) == (base.base, "PeftModelForCausalLM")
    assert "second (not active)" in str(found)


def test_an_adapter_of_transformers_own(model_dir, language_adapter_dir):
    model = new_model(model_dir)
    model.load_adapter(str(language_adapter_dir))
    found = inspect_model(model)
    (adapter,) = found.adapters.values()
    assert found.active == tuple(found.adapters)
    assert set(adapter) == {parts.LAYERS}


def test_modules_to_save(model_dir):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["o_proj"], modules_to_save=["embed_vision"], r=2)
    model = get_peft_model(new_model(model_dir), config)
    (adapter,) = inspect_model(model).adapters.values()
    saved = sum(
        p.numel() * p.element_size()
        for n, p in model.named_parameters()
        if "modules_to_save.default" in n
    )
    lora = [p for n, p in adapter_parameters(model).items() if "vision" in n]
    assert adapter[parts.VISION]["cpu"] == saved + sum(p.nbytes for p in lora)


# -- damage, made by the libraries ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_damaged_quant_states(model_dir, tmp_path, kind):
    model = new_model(model_dir, kind)
    # On some versions the users' errors follow; this test is not about those.
    errors = (TypeError, RuntimeError, NotImplementedError)
    with gemma4_compat.disabled(), contextlib.suppress(*errors):
        split(model, tmp_path)
    before = snapshot(model)
    found = inspect_model(model)
    assert snapshot(model) == before
    expected = find_bnb_meta_quant_state(model)
    assert expected
    (problem,) = (each for each in found.problems if each.patch == "quant_state_offload")
    assert list(problem.modules) == expected
    assert not found.ok
    assert expected[0] in str(found)
    assert "nothing is damaged" not in str(found)


def test_adapters_on_meta(model_dir, tmp_path):
    """PEFT without the patches leaves adapters of offloaded layers on meta."""
    from peft import LoraConfig, get_peft_model

    model = split(new_model(model_dir), tmp_path)
    with gemma4_compat.disabled():
        model = get_peft_model(model, LoraConfig(target_modules=INNER_TOWERS, r=2))
    on_meta = {n for n, p in adapter_parameters(model).items() if p.is_meta}
    assert on_meta
    found = inspect_model(model)
    (problem,) = found.problems
    assert problem.patch == "peft_redispatch"
    assert set(problem.modules) == on_meta
    # with the patches
    model = split(new_model(model_dir), tmp_path / "again")
    model = get_peft_model(model, LoraConfig(target_modules=INNER_TOWERS, r=2))
    assert inspect_model(model).ok


def test_an_adapter_that_was_moved_away(model_dir, language_adapter_dir):
    from peft import PeftModel

    model = PeftModel.from_pretrained(new_model(model_dir), language_adapter_dir)
    assert inspect_model(model).ok
    name, parameter = next(iter(adapter_parameters(model).items()))
    module = model.get_submodule(name.rpartition(".")[0])
    module.weight = torch.nn.Parameter(parameter.to("meta"))
    (problem,) = inspect_model(model).problems
    assert problem.modules == (name,)


def test_a_model_without_weights(model_dir):
    model = meta.meta_model(model_dir)
    found = inspect_model(model)
    assert found.input_device is None
    (problem,) = found.problems
    assert len(problem.modules) == len({*map(id, model.parameters()), *map(id, model.buffers())})
    assert "no weights were loaded" in problem.text


# -- other models ---------------------------------------------------------------------------------


def test_llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    found = inspect_model(transformers.LlamaForCausalLM(config))
    assert found.ok
    assert {each.name for each in found.parts} == {parts.LAYERS, parts.EMBEDDINGS, parts.REST}


def test_any_module():
    found = inspect_model(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    assert found.ok
    assert found.bytes == {"cpu": 4 * (4 * 2 + 2)}
    assert found.input_device is None


def test_wrapped_models(model_dir, tmp_path):
    model = split(new_model(model_dir), tmp_path)
    expected = inspect_model(model)
    assert inspect_model(torch.compile(model)) == expected
    assert inspect_model(torch.nn.DataParallel(model)) == expected


@pytest.mark.parametrize("what", [None, "model", {"a": 1}])
def test_no_model(what):
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module, not"):
        inspect_model(what)


# -- what is shown --------------------------------------------------------------------------------


def test_shown_in_a_terminal(model_dir, adapter_dir, tmp_path):
    from peft import PeftModel

    model = split(new_model(model_dir, "nf4-nested"), tmp_path)
    model = PeftModel.from_pretrained(model, adapter_dir, adapter_name="<b>")
    found = inspect_model(model)
    text = str(found)
    assert repr(found) == text
    assert max(map(len, text.splitlines())) <= 80
    for word in ("per-layer embeddings", "double quantization", "inputs go to cpu", "disk"):
        assert word in text


def test_json(model_dir):
    found = inspect_model(new_model(model_dir))
    plain = json.loads(json.dumps(found.as_dict()))
    assert set(plain) == {
        "model", "base", "quantization", "input_device", "decoding", "at_work", "fast", "parts",
        "offloaded", "adapters", "active", "problems", "bytes", "ok",
    }  # fmt: skip
    assert plain["bytes"] == found.bytes
    assert plain["ok"] is True


def test_how_it_decodes(model_dir):
    found = inspect_model(new_model(model_dir))
    assert found.decoding == "eager, because its decoder is on cpu, not on one GPU"
    assert "eager, because its decoder is on cpu" in str(found)


def test_other_models_have_no_word_on_decoding():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    assert inspect_model(LlamaForCausalLM(config)).decoding is None


@pytest.mark.cuda
def test_how_it_decodes_on_a_gpu(model_dir, tmp_path):
    place = "model.language_model.embed_tokens_per_layer"
    found = inspect_model(load_model(model_dir, None, {"": 0, place: "cpu"}))
    assert found.decoding.startswith("captured as CUDA graphs")
    assert inspect_model(load_model(model_dir, "nf4", {"": 0})).decoding == found.decoding
    assert "by transformers" in inspect_model(load_model(model_dir, None, {"": 0})).decoding
    layer = "model.language_model.layers.1"
    found = inspect_model(load_model(model_dir, None, {"": 0, layer: "cpu"}))
    assert found.decoding.startswith("captured as CUDA graphs")
    model = load_model(model_dir, None, {"": 0, layer: "disk"}, offload_folder=str(tmp_path))
    found = inspect_model(model)
    assert "layers.1" in found.decoding
    assert "is offloaded" in found.decoding


@pytest.mark.cuda
def test_on_a_gpu(model_dir, adapter_dir):
    from peft import PeftModel

    gc.collect()
    before = torch.cuda.memory_allocated()
    given = {**dict.fromkeys(TOWERS, "cpu"), "": 0}
    model = load_model(model_dir, "nf4-nested", given, llm_int8_enable_fp32_cpu_offload=True)
    model = PeftModel.from_pretrained(model, adapter_dir)
    found = inspect_model(model)
    assert found.ok
    assert found.input_device == "cuda:0"
    assert set(found.offloaded) == {"cpu to cuda:0"}
    (adapter,) = found.adapters.values()
    assert {device for by_device in adapter.values() for device in by_device} == {"cuda:0"}
    rounding = 512 * sum(1 for _ in [*model.parameters(), *model.buffers()]) * 6
    assert abs(torch.cuda.memory_allocated() - before - found.bytes["cuda:0"]) < rounding


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_asked_for_and_not_quantized(model_dir, kind):
    """With this flag transformers leaves modules on the CPU, here all, unquantized."""
    from transformers import Gemma4ForConditionalGeneration

    flag = "llm_int8_enable_fp32_cpu_offload"
    model = Gemma4ForConditionalGeneration.from_pretrained(
        model_dir, quantization_config=quantization(kind, **{flag: True}), device_map={"": "cpu"}
    )
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert {type(module) for module in linear} == {torch.nn.Linear}
    linear.remove(model.lm_head)  # tied to the embeddings
    found = inspect_model(model)
    assert not found.ok
    (problem,) = found.problems
    bits = "4-bit" if kind == "nf4" else "8-bit"
    assert f"{bits} was requested, but not one of {len(linear)} linear layers is" in problem.text
    assert flag in problem.text
    assert "fine" not in str(found).split()
    assert inspect_model(new_model(model_dir, kind)).ok


def test_what_makes_a_model_faster_is_named(model_dir, tmp_path):
    """Each with the variable that turns it off."""
    from accelerate import disk_offload

    model = disk_offload(new_model(model_dir), tmp_path, execution_device=torch.device("cpu"))
    found = inspect_model(model)
    assert found.at_work.keys() == {"host_embedding"}
    text = " ".join(str(found).split())
    assert "GEMMA4_COMPAT_HOST_EMBEDDING=0 turns it off" in text
    with gemma4_compat.disabled("host_embedding"):
        assert inspect_model(model).at_work == {}
    assert inspect_model(new_model(model_dir)).at_work == {}
