"""Load, split and compare tiny models; shared by the tests."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import subprocess

import torch
from torch import nn

import gemma4_compat
from gemma4_compat.model.hooks import offload_hook
from gemma4_compat.model.meta import bnb_config
from gemma4_compat.tiny import TOWERS, audio_inputs, image_inputs, text_inputs

INPUTS = {"text": text_inputs, "image": image_inputs, "audio": audio_inputs}
#: bitsandbytes skips these: the quantized audio tower raises on transformers < 5.11
AUDIO_IN_FLOAT = ["model.audio_tower", "lm_head"]
#: layers of the ``config_of`` families that are too small for the packed format of some CPUs
NOT_PACKED = ["lm_head", "router.proj", "modality_router", "prediction_coefs", "correction_coefs"]


def quantization(kind: str | None, **options):
    """``None`` (bf16), "nf4" (single), "nf4-nested" or "int8" as a BitsAndBytesConfig."""
    options.setdefault("llm_int8_skip_modules", AUDIO_IN_FLOAT)
    quant = {None: "bf16", "nf4-nested": "nf4"}.get(kind, kind)
    return bnb_config(quant, nested=kind == "nf4-nested", **options)


def load_model(model_dir, kind=None, device_map=None, **options):
    """The checkpoint on one device (the CPU unless a map says otherwise), in eval mode."""
    from transformers import Gemma4ForConditionalGeneration

    load_options = {k: options.pop(k) for k in ("max_memory", "offload_folder") if k in options}
    model = Gemma4ForConditionalGeneration.from_pretrained(
        model_dir,
        quantization_config=quantization(kind, **options),
        device_map=device_map or {"": "cpu"},
        dtype=torch.bfloat16,
        **load_options,
    )
    if kind in ("nf4", "nf4-nested"):
        assert "Linear4bit" in {type(module).__name__ for module in model.modules()}
    return model.eval()


def new_model(model_dir, kind=None):
    """As ``load_model``, but a copy of what was loaded once; for tests of what comes after loading.

    Not where patches are switched off while it is loaded.
    """
    return copy.deepcopy(_loaded(model_dir, kind))


@functools.lru_cache(8)
def _loaded(model_dir, kind):
    return load_model(model_dir, kind)


def split(model, offload_dir, device_map=None):
    """Offload the towers to disk with accelerate's real hooks; the rest executes on the CPU."""
    from accelerate import dispatch_model

    return dispatch_model(
        model,
        device_map or {**dict.fromkeys(TOWERS, "disk"), "": "cpu"},
        main_device="cpu",
        offload_dir=str(offload_dir),
        skip_keys=model._skip_keys_device_placement,
    )


def logits(model, kinds=("text", "image", "audio")):
    """Logits by kind of input: float32 on the CPU."""
    device = gemma4_compat.input_device(model)
    result = {}
    with torch.no_grad():
        for kind in kinds:
            inputs = {k: v.to(device) for k, v in INPUTS[kind](model.config).items()}
            result[kind] = model(**inputs).logits.float().cpu()
    return result


def fails(error):
    """A function of the package that raises this error, which is not the user's then."""
    namespace = {"error": error}
    source = "def fail(*args, **kwargs):\n    raise error"
    exec(compile(source, gemma4_compat.__file__, "exec"), namespace)
    return namespace["fail"]


def assert_same(found, expected, tolerance=0.0):
    """Assert equal logits: bit for bit, or within ``tolerance`` (an absolute difference)."""
    assert found.keys() == expected.keys()
    for kind in expected:
        assert found[kind].isfinite().all(), f"{kind} logits are not finite"
        worst = (found[kind] - expected[kind]).abs().max().item()
        assert worst <= tolerance, f"{kind} logits differ by up to {worst:.3g}"


def offloaded(model):
    """Names of the base model's parameters on meta."""
    return {n for n, p in model.named_parameters() if p.is_meta and "lora_" not in n}


def adapter_parameters(model):
    return {n: p for n, p in model.named_parameters() if "lora_" in n}


def linear4bit(n_in=256, n_out=128, nested=True, seed=0, **options):
    """An NF4 layer with random weights; ``.to(device)`` quantizes them."""
    import bitsandbytes as bnb

    options = {"bias": False, "compute_dtype": torch.bfloat16, **options}
    module = bnb.nn.Linear4bit(n_in, n_out, compress_statistics=nested, quant_type="nf4", **options)
    generator = torch.Generator().manual_seed(seed)
    module.weight.data.copy_(torch.randn(n_out, n_in, generator=generator))
    if module.bias is not None:
        nn.init.zeros_(module.bias)
    return module


def linear8bit_layers():
    """Two quantized Linear8bitLt layers on the CPU, one after the other, 64 wide."""
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(0)
    layers = (Linear8bitLt(64, 64, has_fp16_weights=False) for _ in range(2))
    return nn.Sequential(*layers).bfloat16().to("cpu").requires_grad_(False)


def dequantized(module):
    """The module with bitsandbytes' layers replaced by bfloat16 layers of the same values.

    Call it before the first forward, which repacks the weights on some CPUs.
    """
    import bitsandbytes as bnb

    for name, layer in list(module.named_modules()):
        if isinstance(layer, bnb.nn.Linear4bit):
            values = bnb.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            values = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        else:
            continue
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False)
        linear.weight.data, linear.bias = values.to(torch.bfloat16), layer.bias
        module.set_submodule(name, linear)
    return module


def unquantized(model):
    """Names of the linear layers that are not quantized; a reference model must skip them too."""
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    return [name.replace(".base_layer", "") for name in names if "lora_" not in name]


def on_one_gpu(model_dir, kind, like):
    """The model with the same layers quantized as in ``like``, all on one GPU."""
    model = load_model(model_dir, kind, {"": 0}, llm_int8_skip_modules=unquantized(like))
    assert unquantized(model) == unquantized(like)
    return model


def transplant(split, one):
    """Give ``one`` the quantized weights of ``split``.

    A layer on the CPU is quantized by the CPU's kernels, which round differently from the GPU's.
    """
    import bitsandbytes as bnb

    for name, module in split.named_modules():
        if not isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            continue
        hook = offload_hook(module)
        weight = hook.weights_map["weight"] if module.weight.is_meta else module.weight
        weight = weight.detach().as_subclass(torch.Tensor)
        target = one.get_submodule(name.replace(".base_layer", ""))
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state.as_dict(packed=True)
            target.weight = bnb.nn.Params4bit.from_prequantized(weight, state, device="cuda:0")
        else:
            scale = hook.weights_map["SCB"] if module.weight.is_meta else module.weight.SCB
            target.weight = bnb.nn.Int8Params(
                weight.to(0), requires_grad=False, CB=weight.to(0), SCB=scale.to(0)
            )
            target.init_8bit_state()


def config_of(family, **options):
    """Model class and config of a family; per-layer embeddings have the released width: exact."""
    import transformers

    sizes = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "pad_token_id": 0,
    }
    if family == "Llama":
        return transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes)
    sizes |= {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
    }
    if family != "Gemma4 experts":
        sizes |= {
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 3,
        }
    if family == "Gemma3n":
        sizes |= {"altup_num_inputs": 2, "laurel_rank": 128}
        sizes |= {"intermediate_size": [128] * 6, "activation_sparsity_pattern": [0.0] * 6}
        config = transformers.Gemma3nTextConfig(**sizes | options)
        return transformers.Gemma3nForCausalLM, config
    sizes |= {"global_head_dim": 128}
    if family == "Gemma4 experts":
        sizes |= {"enable_moe_block": True, "num_experts": 32, "top_k_experts": 2}
        sizes |= {"moe_intermediate_size": 64, "hidden_size_per_layer_input": 0}
    return transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(**sizes | options)


def save_random(family, folder, **options):
    """Save a random checkpoint of one of the families of ``config_of``, in bfloat16."""
    model_class, config = config_of(family, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)


def run_command(*arguments):
    """Run the command line in this process; return the exit code."""
    from gemma4_compat import cli

    try:
        return cli.main(list(map(str, arguments)))
    except SystemExit as stopped:
        return stopped.code


def run_process(command, pythonpath, cwd=None, **variables):
    """Run a command with this PYTHONPATH, and without our environment variables."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GEMMA4_COMPAT")}
    environment["PYTHONPATH"] = os.pathsep.join(pythonpath)
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def with_layers_on_the_cpu(model, layers=range(1, 5), device=0):
    """A model on the GPU with these decoder layers dispatched to the CPU."""
    from accelerate import dispatch_model

    return dispatch_model(
        model,
        {"": device, **{f"model.language_model.layers.{i}": "cpu" for i in layers}},
        main_device=device,
        skip_keys=model._skip_keys_device_placement,
    )


def save_qat(model_dir, folder):
    """Save the checkpoint in GemmaQuantizer's own format: 2, 4 and 8 bit, and measured ranges.

    The towers stay as they are.
    """
    import json

    from transformers import Gemma4ForConditionalGeneration, GemmaQuantizationConfig
    from transformers.integrations.gemma_quant import replace_with_quant_layers

    model = Gemma4ForConditionalGeneration.from_pretrained(model_dir, dtype=torch.bfloat16)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    for config in (model.config, model.config.text_config):
        config.tie_word_embeddings = False  # the table of a quantized embedding is no parameter
    config = GemmaQuantizationConfig(
        quantize_embeddings=True,
        module_quant_configs={r"mlp\.down_proj": {"num_bits": 2}, r"o_proj": {"num_bits": 8}},
        modules_to_not_convert=[f"model.{part}" for part in ("vision_tower", "audio_tower")],
    )
    weights = {name: each.weight for name, each in model.named_modules() if hasattr(each, "weight")}
    replace_with_quant_layers(model, config, config.modules_to_not_convert)
    for name, layer in model.named_modules():
        if not hasattr(layer, "num_bits"):
            continue
        weight, bits = weights[name].detach().float(), layer.num_bits
        scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        packed = (weight / scale).round().to(torch.int8)
        if bits < 8:
            steps = (packed + 2 ** (bits - 1)).to(torch.uint8).unflatten(1, (-1, 8 // bits))
            packed = sum(steps[..., i] << bits * i for i in range(8 // bits)).to(torch.uint8)
        if isinstance(layer, nn.Linear):
            layer.weight.data, layer.weight_scale.data = packed, scale
            layer.input_activation_scale.data.fill_(0.02)
            layer.output_activation_scale.data.fill_(0.05)
        else:
            layer.embedding_quantized.data, layer.embedding_scale.data = packed, scale
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] = config.to_dict()
    (folder / "config.json").write_text(json.dumps(said, default=str))
    return folder


def save_w4a16(model_dir, folder):
    """Save the checkpoint as compressed-tensors' pack-quantized w4a16, made by that library.

    The decoder's linear layers are in 4 bits.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(model_dir, dtype=torch.bfloat16)
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=[r"re:.*language_model\.layers.*"], weights=weights)
    status = QuantizationStatus.FROZEN
    config = QuantizationConfig(config_groups={"group": scheme}, quantization_status=status)
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.detach().float().unflatten(1, (-1, 32))
            module.weight_scale.data.copy_(groups.abs().amax(2) / 7)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def pretend_avx512_bf16(patch):
    """Let bitsandbytes repack 4-bit weights as on a CPU with AVX512-BF16; its kernel is replaced.

    The replacement of the kernel reads the packed weight and state, as the kernel does.
    """
    from bitsandbytes import functional

    def gemv_4bit(x, weight, out=None, state=None, **_):
        assert state.packing_format_for_cpu
        assert not state.nested
        assert state.absmax.dim() == 2
        plain = copy.copy(state)
        plain.original_nested, plain.absmax = False, state.absmax.T.reshape(-1).float()
        unpack = inspect.unwrap(functional._convert_weight_packed_for_cpu_inverse)
        values, plain = unpack(weight, plain)
        return nn.functional.linear(x, functional.dequantize_4bit(values, plain).to(x.dtype))

    patch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    patch.setattr(functional, "gemv_4bit", gemv_4bit)
