"""Sizes from the config equal those of loaded models and real caches."""

from __future__ import annotations

import json

import pytest
import torch

from gemma4_compat.errors import InputError
from gemma4_compat.model import meta, parts, sizes
from gemma4_compat.model.caches import cache_name
from gemma4_compat.tiny import LANGUAGE_TARGETS, TOWERS, build_adapter
from tests.shapes import write_config
from tests.support import load_model, quantization

bnb = pytest.importorskip("bitsandbytes")


def held(model):
    """Names and bytes of every tensor of a loaded model; tied tensors count once."""
    found, seen = {}, set()

    def add(name, tensor):
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor.untyped_storage().nbytes()

    for name, parameter in model.named_parameters():
        add(name, parameter.detach())
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            add(f"{name}.absmax", state.absmax)
            add(f"{name}.quant_map", state.code)
            if state.nested:
                add(f"{name}.nested_absmax", state.state2.absmax)
                add(f"{name}.nested_quant_map", state.state2.code)
                add(f"{name}.nested_offset", state.offset)
        if isinstance(parameter, bnb.nn.Int8Params):
            assert parameter.CB.data_ptr() == parameter.data_ptr()
            add(f"{name}.SCB", parameter.SCB)
    for name, buffer in model.named_buffers():
        add(name, buffer)
    return found


def predicted(model_dir, config=None, device_map=None):
    model = meta.meta_model(model_dir, config, device_map)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    return {size.name: size.bytes for size in sizes.tensor_sizes(model)}


def bytes_under(found, module, *, on_cuda=False):
    """The bytes of all tensors in a module; "" is the whole model."""
    return sum(
        size.on_cuda if on_cuda else size.bytes
        for size in found
        if not module or parts.is_under(size.name, [module])
    )


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "nf4", "nf4-nested", "int8"])
def test_every_tensor_of_a_loaded_model(model_dir, kind):
    loaded = load_model(model_dir, kind, llm_int8_skip_modules=None)
    assert predicted(model_dir, quantization(kind, llm_int8_skip_modules=None)) == held(loaded)


@pytest.mark.parametrize("kind", [None, "nf4", "nf4-nested", "int8"])
def test_experts(moe_dir, kind):
    from transformers import AutoModelForCausalLM

    config = quantization(kind, llm_int8_skip_modules=["lm_head"])
    loaded = AutoModelForCausalLM.from_pretrained(
        moe_dir, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    packed = [
        p for n, p in loaded.named_parameters() if ".experts." in n and p.dtype == torch.uint8
    ]
    assert len(packed) == (6 if kind in ("nf4", "nf4-nested") else 0)
    assert predicted(moe_dir, config) == held(loaded)


def test_what_is_offloaded_is_not_quantized(model_dir):
    """transformers does not quantize offloaded modules; the loaded model skips the same modules."""
    offloaded = [*TOWERS, "model.language_model.layers.5"]
    device_map = {**dict.fromkeys(offloaded, "cpu"), "": 0}
    found = predicted(model_dir, meta.bnb_config("nf4", offload=True), device_map)
    plain = meta.meta_model(model_dir)
    kept = [name for name, module in plain.named_modules() if parts.is_under(name, offloaded)]
    loaded = load_model(model_dir, "nf4-nested", llm_int8_skip_modules=[*kept, "lm_head"])
    assert found == held(loaded)


def test_the_options_are_those_of_a_config():
    config = meta.bnb_config("nf4", offload=True)
    assert config.bnb_4bit_quant_type == "nf4"
    assert config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype is torch.bfloat16
    assert config.llm_int8_enable_fp32_cpu_offload
    assert meta.bnb_config("int8").load_in_8bit
    assert meta.bnb_config("bf16") is None


def test_bytes_under_a_module(model_dir):
    model = meta.meta_model(model_dir, meta.bnb_config("nf4"))
    found = sizes.tensor_sizes(model)
    layer = "model.language_model.layers.1"
    down = bytes_under(found, f"{layer}.mlp.down_proj")
    # Half a byte for each weight, an absmax in uint8 for 64 weights, a float32 for 256 of those,
    # two tables and an offset.
    numbers = model.get_submodule(f"{layer}.mlp.down_proj").weight.numel()
    assert down == numbers // 2 + numbers // 64 + 4 * -(-numbers // 64 // 256) + 64 + 1024 + 4
    children = [f"{layer}.{name}" for name, _ in model.get_submodule(layer).named_children()]
    own = sum(s.bytes for s in found if s.name.rpartition(".")[0] == layer)
    assert bytes_under(found, layer) == own + sum(bytes_under(found, child) for child in children)
    assert bytes_under(found, "") == sum(size.bytes for size in found)
    assert bytes_under(found, "model.language_model.layers.999") == 0
    assert all(size.on_cuda % 512 == 0 and size.on_cuda >= size.bytes for size in found)
    assert bytes_under(found, layer, on_cuda=True) >= bytes_under(found, layer)


def test_parts(model_dir):
    found = sizes.tensor_sizes(meta.meta_model(model_dir))
    part = {size.name: size.part for size in found}
    assert part["model.language_model.embed_tokens_per_layer.weight"] == parts.PLE
    assert part["model.language_model.embed_tokens.weight"] == parts.EMBEDDINGS
    assert part["model.language_model.layers.0.mlp.up_proj.weight"] == parts.LAYERS
    assert part["model.language_model.norm.weight"] == parts.REST
    assert part["model.embed_vision.embedding_projection.weight"] == parts.VISION
    assert part["model.embed_audio.embedding_projection.weight"] == parts.AUDIO
    towers = [name for name in part if name.startswith(TOWERS)]
    assert {part[name] for name in towers} == {parts.VISION, parts.AUDIO}
    assert "lm_head.weight" not in part  # tied


def test_e2b(e2b_dir):
    model = meta.meta_model(e2b_dir, meta.bnb_config("nf4"))
    found = sizes.tensor_sizes(model)
    ple = bytes_under(found, "model.language_model.embed_tokens_per_layer.weight")
    assert ple == 262144 * 35 * 256 * 2
    plain = sizes.tensor_sizes(meta.meta_model(e2b_dir))
    assert bytes_under(plain, "") / 2 == pytest.approx(5.10e9, rel=0.01)
    # Measured on a GPU: 6.28 GiB whole, 1.91 GiB without the per-layer embeddings.
    whole = bytes_under(found, "", on_cuda=True)
    assert whole == pytest.approx(6.28 * 2**30, rel=0.01)
    assert whole - ple == pytest.approx(1.91 * 2**30, rel=0.01)


# -- adapters -------------------------------------------------------------------------------------


def test_adapter_as_peft_loads_it(model_dir, tmp_path):
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file, save_file

    adapter = build_adapter(tmp_path / "adapter", model_dir, targets=LANGUAGE_TARGETS)
    file = adapter / "adapter_model.safetensors"
    halved = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(halved, file, metadata={"format": "pt"})
    model = peft.PeftModel.from_pretrained(load_model(model_dir), adapter)
    loaded = [p for n, p in model.named_parameters() if "lora_" in n]
    found = sizes.adapter_sizes(adapter)
    assert len(found) == len(loaded)
    assert sum(size.bytes for size in found) == sum(p.numel() * p.element_size() for p in loaded)


def test_no_adapter(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such folder"):
        sizes.adapter_sizes(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no adapter_model\.safetensors"):
        sizes.adapter_sizes(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not one at all")
    with pytest.raises(InputError, match=r"adapter_model\.safetensors: not a safetensors file"):
        sizes.adapter_sizes(tmp_path)


# -- the KV cache ---------------------------------------------------------------------------------

TINY = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "pad_token_id": 0,
}
EXPERTS = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
SHAPES = {
    "shared": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "dense": {"hidden_size_per_layer_input": 0},
    "experts": EXPERTS,
}


def cached(model, length):
    """Bytes of the storages of a real static cache after a forward."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=length)
    with torch.no_grad():
        model(input_ids=torch.full((1, 5), 3), **{cache_name(): cache})
    return cache_bytes(cache)


def cache_bytes(cache):
    """Bytes of a cache's keys and values."""
    storages = {}
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if tensor is not None:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("length", [6, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_static_cache(tmp_path, shape, length):
    from transformers import Gemma4ForConditionalGeneration

    folder = write_config(tmp_path, {**TINY, **SHAPES[shape]})
    plain = meta.meta_model(folder)
    with torch.random.fork_rng(devices=[]):
        real = Gemma4ForConditionalGeneration(plain.config).bfloat16().eval()
    assert sum(sizes.static_cache_bytes(plain, length).values()) == cached(real, length)


def test_other_models(tmp_path):
    """Gemma 4 unified, if transformers has it; the Gemma 3n text model; and another family."""
    import transformers

    text = {name: value for name, value in TINY.items() if name != "global_head_dim"}
    configs = [
        transformers.Gemma3nTextConfig(
            **text,
            num_kv_shared_layers=2,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
            architectures=["Gemma3nForCausalLM"],
        ),
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            architectures=["LlamaForCausalLM"],
        ),
    ]
    if hasattr(transformers, "Gemma4UnifiedTextConfig"):
        unified = {k: v for k, v in TINY.items() if "per_layer" not in k}
        configs.append(
            transformers.Gemma4UnifiedTextConfig(
                **unified, architectures=["Gemma4UnifiedForCausalLM"]
            )
        )
    for config in configs:
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        plain = meta.meta_model(folder)
        with torch.random.fork_rng(devices=[]):
            real = type(plain)._from_config(plain.config, dtype=torch.bfloat16).eval()
        assert {s.name: s.bytes for s in sizes.tensor_sizes(plain)} == held(real)
        predicted = sum(sizes.static_cache_bytes(plain, 40).values())
        assert predicted == cached(real, 40), config.model_type


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json"),
        ("{", r"config\.json: not JSON"),
        ("[]", r"config\.json: not a JSON object"),
        ({"model_type": "no_such_model"}, r"config\.json: not understood by transformers"),
        (
            {"model_type": "gemma4", "architectures": ["NoSuchModel"]},
            r"config\.json: transformers \S+ has no NoSuchModel",
        ),
        (
            {"model_type": "gemma4", "text_config": {"num_hidden_layers": "many"}},
            r"config\.json: (not understood|\S+ cannot be built)",
        ),
    ],
    ids=["missing", "cut", "list", "unknown", "class", "wrong"],
)
def test_configs_that_cannot_work(tmp_path, content, message):
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        meta.meta_model(tmp_path)


def test_no_folder(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such folder"):
        meta.meta_model(tmp_path / "nowhere")
