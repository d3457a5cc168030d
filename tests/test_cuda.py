"""The users' device maps on a real GPU: the logits of one device, and an unchanged base."""

from __future__ import annotations

import gc

import accelerate
import pytest
import torch
from packaging.version import Version

from gemma4_compat.tiny import BROAD_TARGETS, TOWERS, image_inputs, text_inputs
from tests.support import (
    adapter_parameters,
    assert_same,
    load_model,
    logits,
    on_one_gpu,
    transplant,
)

pytestmark = pytest.mark.cuda

KINDS = pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
SPLIT = {**dict.fromkeys(TOWERS, "cpu"), "": 0}
#: the same on every stack: offloaded modules and the head are not quantized
OFFLOADED = {"llm_int8_enable_fp32_cpu_offload": True, "llm_int8_skip_modules": None}


def placement(model):
    base = model.base_model.model if hasattr(model, "peft_config") else model
    parameters = {
        name.replace(".base_layer.", "."): str(parameter.device)
        for name, parameter in base.named_parameters()
        if "lora_" not in name
    }
    hooks = {
        name.replace(".base_layer", ""): id(module._hf_hook)
        for name, module in base.named_modules()
        if hasattr(module, "_hf_hook")
    }
    return parameters, hooks, dict(base.hf_device_map)


def adapted(model, adapter_dir, **options):
    from peft import PeftModel

    before = placement(model)
    model = PeftModel.from_pretrained(model, adapter_dir, **options).eval()
    assert placement(model) == before, "loading the adapter moved the base model"
    devices = {str(parameter.device) for parameter in adapter_parameters(model).values()}
    assert devices == {"cuda:0"}
    return model


def check(split, model_dir, adapter_dir, kind, quantized_elsewhere=False, **options):
    """Base, adapter, second forward and generate equal those on one GPU."""
    from peft import PeftModel

    one = on_one_gpu(model_dir, kind, split)
    if quantized_elsewhere:
        transplant(split, one)
    assert_same(logits(split), logits(one))
    one = PeftModel.from_pretrained(one, adapter_dir).eval()
    expected = logits(one)
    allocated = torch.cuda.memory_allocated(0)
    split = adapted(split, adapter_dir, **options)
    added = sum(p.numel() * p.element_size() for p in adapter_parameters(split).values())
    assert torch.cuda.memory_allocated(0) - allocated < 2 * added + 2**20
    for _ in range(3):
        assert_same(logits(split), expected)
    prompt = {k: v.to(0) for k, v in text_inputs(one.config).items()}
    tokens = [m.generate(**prompt, max_new_tokens=4, do_sample=False) for m in (one, split)]
    assert torch.equal(*tokens)
    return split


@pytest.fixture(autouse=True)
def _empty_gpu():
    yield
    gc.collect()
    torch.cuda.empty_cache()


@KINDS
def test_towers_on_the_cpu(model_dir, adapter_dir, kind):
    split = load_model(model_dir, kind, SPLIT, **OFFLOADED)
    check(split, model_dir, adapter_dir, kind)


@KINDS
def test_arguments_that_the_users_gave_to_peft(model_dir, adapter_dir, kind, tmp_path):
    split = load_model(model_dir, kind, SPLIT, **OFFLOADED)
    check(
        split,
        model_dir,
        adapter_dir,
        kind,
        device_map=SPLIT,
        offload_dir=str(tmp_path),
        offload_buffers=True,
        ephemeral_gpu_offload=True,
        torch_device="cuda:0",
    )


@pytest.mark.whole_gpu
@KINDS
def test_on_a_full_gpu(model_dir, adapter_dir, kind):
    """With little free memory, PEFT's inferred device map would offload more modules."""
    free, _ = torch.cuda.mem_get_info(0)
    ballast = torch.empty(free - 2**30, dtype=torch.uint8, device=0)
    split = load_model(model_dir, kind, SPLIT, **OFFLOADED)
    check(split, model_dir, adapter_dir, kind)
    del ballast


@KINDS
def test_decoder_layers_dispatched_to_the_cpu(model_dir, adapter_dir, kind):
    from accelerate import dispatch_model

    device_map = {f"model.language_model.layers.{i}": "cpu" for i in (1, 2, 4)}
    model = load_model(model_dir, kind, {"": 0})
    before = torch.cuda.memory_allocated(0)
    skip_keys = model._skip_keys_device_placement
    split = dispatch_model(model, {**device_map, "": 0}, skip_keys=skip_keys)
    gc.collect()
    leaving = sum(
        module.weight.numel() + sum(t.numel() * t.element_size() for t in tensors(state))
        for name, module in split.named_modules()
        if module.__dict__.get("quant_state") is not None and module.weight.is_meta
        for state in [module.weight.quant_state]
    )
    assert leaving > 0
    assert torch.cuda.memory_allocated(0) <= before - leaving, "the device copy is not freed"
    layer = split.get_submodule("model.language_model.layers.1.mlp.down_proj")
    for state in (layer.weight.quant_state, layer.quant_state):
        assert {str(tensor.device) for tensor in tensors(state)} == {"cpu"}
    check(split, model_dir, adapter_dir, kind)


@KINDS
def test_automatic_map_with_little_memory(model_dir, adapter_dir, kind):
    footprint = load_model(model_dir, kind, {"": 0}).get_memory_footprint()
    limits = {0: footprint // 2, "cpu": "1GiB"}
    split = load_model(model_dir, kind, "auto", max_memory=limits, **OFFLOADED)
    offloaded = [
        name
        for name, module in split.named_modules()
        if type(module).__name__ == "Linear4bit" and module.weight.is_meta
    ]
    assert offloaded
    check(split, model_dir, adapter_dir, kind, quantized_elsewhere=True)


def tensors(state):
    found = [state.absmax, state.code]
    if state.nested:
        found += [state.offset, state.state2.absmax, state.state2.code]
    return found


def copies_to_host(model, inputs):
    """The copies from the GPU to the host in one forward, by the name of the operation."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        model(**inputs)
        torch.cuda.synchronize()
    return sorted(event.name for event in trace.events() if "DtoH" in event.name)


@KINDS
def test_no_weight_or_quant_state_comes_back_from_the_gpu(model_dir, adapter_dir, kind):
    from accelerate import dispatch_model
    from peft import PeftModel

    def adapted_copies(model):
        model = PeftModel.from_pretrained(model, adapter_dir).eval()
        inputs = {k: v.to(0) for k, v in text_inputs(model.config).items()}
        with torch.no_grad():
            model(**inputs)
            return copies_to_host(model, inputs)

    resident = adapted_copies(load_model(model_dir, kind, {"": 0}))
    device_map = {f"model.language_model.layers.{i}": "cpu" for i in (1, 2, 4)}
    split = load_model(model_dir, kind, {"": 0})
    skip_keys = split._skip_keys_device_placement
    split = dispatch_model(split, {**device_map, "": 0}, skip_keys=skip_keys)
    assert adapted_copies(split) == resident


@KINDS
def test_training_on_a_split_model(model_dir, kind):
    from accelerate import dispatch_model
    from peft import LoraConfig, get_peft_model

    def gradients(model):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=BROAD_TARGETS, init_lora_weights=False)
        model = get_peft_model(model, config).train()
        inputs = {k: v.to(0) for k, v in text_inputs(model.config).items()}
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    one = load_model(model_dir, kind, {"": 0})
    device_map = {**{f"model.language_model.layers.{i}": "cpu" for i in (1, 4)}, "": 0}
    split = load_model(model_dir, kind, {"": 0})
    split = dispatch_model(split, device_map, skip_keys=split._skip_keys_device_placement)
    expected_loss, expected = gradients(one)
    loss, found = gradients(split)
    assert loss == expected_loss
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_int8_with_an_adapter_on_wrappers(model_dir, adapter_dir):
    from peft import PeftModel

    model = load_model(model_dir, "int8", {"": 0})
    base = logits(model)
    model = PeftModel.from_pretrained(model, adapter_dir).eval()
    assert not torch.equal(logits(model)["image"], base["image"])
    model = model.unload()
    assert_same(logits(model), base)


def test_int8_with_towers_on_the_cpu(model_dir, adapter_dir):
    split = load_model(model_dir, "int8", SPLIT, **OFFLOADED)
    check(split, model_dir, adapter_dir, "int8")


@pytest.mark.usefixtures("offloaded_eight_bit")
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_int8_decoder_layers_offloaded(model_dir, adapter_dir, where, tmp_path):
    from accelerate import dispatch_model

    model = load_model(model_dir, "int8", {"": 0})
    split = dispatch_model(
        model,
        {**{f"model.language_model.layers.{i}": where for i in (1, 2, 4)}, "": 0},
        offload_dir=str(tmp_path),
        skip_keys=model._skip_keys_device_placement,
    )
    layer = split.get_submodule("model.language_model.layers.1.mlp.down_proj")
    assert layer.weight.is_meta
    check(split, model_dir, adapter_dir, "int8")


def int8_with_an_automatic_map(model_dir):
    footprint = load_model(model_dir, "int8", {"": 0}).get_memory_footprint()
    limits = {0: footprint // 2, "cpu": "1GiB"}
    split = load_model(model_dir, "int8", "auto", max_memory=limits, **OFFLOADED)
    names = [n for n, m in split.named_modules() if type(m).__name__ == "Linear8bitLt"]
    assert any(split.get_submodule(name).weight.is_meta for name in names)
    return split


@pytest.mark.usefixtures("offloaded_eight_bit")
def test_int8_with_an_automatic_map(model_dir, adapter_dir):
    split = int8_with_an_automatic_map(model_dir)
    check(split, model_dir, adapter_dir, "int8", quantized_elsewhere=True)


# Before accelerate 1.14 loading the model itself needs hf_initialized_flag.
@pytest.mark.skipif(Version(accelerate.__version__) < Version("1.14"), reason="does not load")
@pytest.mark.regression("peft_redispatch", r"Expected a cuda device, but got: cpu")
def test_adapter_on_offloaded_8_bit_layers(model_dir, language_adapter_dir):
    from peft import PeftModel

    split = int8_with_an_automatic_map(model_dir)
    one = on_one_gpu(model_dir, "int8", split)
    transplant(split, one)
    expected = logits(PeftModel.from_pretrained(one, language_adapter_dir).eval())
    assert_same(logits(PeftModel.from_pretrained(split, language_adapter_dir).eval()), expected)


@pytest.mark.parametrize("kind", ["nf4-nested", "int8"])
def test_quantized_towers_see_and_hear(model_dir, kind):
    """The users left the towers unquantized, which takes a GiB; quantized towers work too."""
    model = load_model(model_dir, kind, {"": 0}, llm_int8_skip_modules=["lm_head"])
    float_towers = load_model(
        model_dir, kind, {"": 0}, llm_int8_skip_modules=[*TOWERS, "embed_vision", "lm_head"]
    )
    assert model.get_memory_footprint() < float_towers.get_memory_footprint()
    inputs = {k: v.to(0) for k, v in image_inputs(model.config).items()}
    features = []
    for each in (model, float_towers):
        with torch.no_grad():
            tower = each.model.vision_tower
            found = tower(inputs["pixel_values"], inputs["image_position_ids"])
        features.append(found.last_hidden_state.float().flatten())
    similarity = torch.cosine_similarity(*features, dim=0).item()
    assert similarity > 0.9, f"quantized and float features: cosine {similarity:.2f}"
    assert all(values.isfinite().all() for values in logits(model).values())


@pytest.mark.cuda(gpus=2)
def test_second_gpu_is_not_entered(model_dir, adapter_dir):
    split = load_model(model_dir, "nf4-nested", SPLIT, **OFFLOADED)
    torch.cuda.reset_peak_memory_stats(1)
    before = torch.cuda.memory_allocated(1)
    adapted(split, adapter_dir)
    assert torch.cuda.max_memory_allocated(1) == before


@pytest.mark.cuda(gpus=2)
def test_layers_on_two_gpus_and_the_cpu(model_dir, adapter_dir):
    from peft import PeftModel

    # No entry "": with one, accelerate gives the layers on GPU 1 hooks for GPU 0.
    parts = ("embed_tokens", "embed_tokens_per_layer", "per_layer_model_projection", "norm")
    parts = (*parts, "per_layer_projection_norm", "rotary_emb")
    rest = [*(f"model.language_model.{part}" for part in parts), "lm_head"]
    rest += ["model.embed_vision", "model.embed_audio"]
    layers = {f"model.language_model.layers.{i}": int(i > 2) for i in range(6)}
    device_map = {**dict.fromkeys(TOWERS, "cpu"), **layers, **dict.fromkeys(rest, 0)}
    split = load_model(model_dir, "nf4-nested", device_map, **OFFLOADED)
    one = PeftModel.from_pretrained(on_one_gpu(model_dir, "nf4-nested", split), adapter_dir)
    before = placement(split)
    split = PeftModel.from_pretrained(split, adapter_dir).eval()
    assert placement(split) == before
    for name, parameter in adapter_parameters(split).items():
        _, found, index = name.partition("language_model.layers.")
        expected = layers[f"model.language_model.layers.{index[0]}"] if found else 0
        assert parameter.device == torch.device("cuda", expected), name
    assert_same(logits(split), logits(one.eval()))
