"""Checkpoints with the shapes of real models and random weights, and a LoRA adapter for each.

``python -m benchmarks.checkpoint CACHE [SHAPE]`` writes them unless they exist, and prints one JSON
line that describes the machine.  With ``--count`` as CACHE it only counts parameters.
"""

from __future__ import annotations

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .measure import pinned_bandwidth

_FIVE = ["sliding_attention"] * 4 + ["full_attention"]
_SIX = ["sliding_attention"] * 5 + ["full_attention"]
_COMMON = {
    "num_key_value_heads": 1,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": 30.0,
}
_LARGE = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "final_logit_softcapping": 30.0,
}
TEXT: dict[str, dict[str, Any]] = {
    "e2b": {
        **_COMMON,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "layer_types": 7 * _FIVE,
        "num_kv_shared_layers": 20,
    },
    "e4b": {
        **_COMMON,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layer_types": 7 * _SIX,
        "num_kv_shared_layers": 18,
        "num_key_value_heads": 2,
    },
    "12b": {
        **_LARGE,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "layer_types": 8 * _SIX,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
    },
    "26b": {
        **_LARGE,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": 5 * _SIX,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "31b": {
        **_LARGE,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "layer_types": 10 * _SIX,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    # bitsandbytes supports these widths on a CPU too.
    "tiny": {
        **_COMMON,
        "hidden_size": 128,
        "intermediate_size": 128,
        "use_double_wide_mlp": True,
        "layer_types": 2 * ["sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 128,
        "num_attention_heads": 2,
        "head_dim": 64,
        "global_head_dim": 128,
        "vocab_size": 512,
        "vocab_size_per_layer_input": 512,
    },
}
TINY_VISION = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "position_embedding_size": 32,
}
TINY_AUDIO = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [32, 16],
    "output_proj_dims": 128,
}
TARGETS = r".*\.language_model\.layers\..*\.(q|k|v|o|gate|up|down)_proj"
#: LoRA on the experts, too: of rank 16, it has half a billion parameters
EXPERTS = {
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    "rank_pattern": {r".*experts.*": 4},
}
_SHARD_BYTES = 2 * 10**9


def layers(shape: str) -> int:
    """The number of decoder layers."""
    return len(TEXT[shape]["layer_types"])


def offloaded_layers(shape: str) -> range:
    """The decoder layers that the streaming cases put on the CPU: the last 20 of 35."""
    return range(layers(shape) - round(layers(shape) * 20 / 35), layers(shape))


def config_of(shape: str) -> Any:
    """The config of a shape; of "SHAPE:LAYERS", with so many layers and a small vocabulary."""
    import transformers

    shape, _, count = shape.partition(":")
    text = {**TEXT[shape], "num_hidden_layers": int(count or layers(shape))}
    if count:
        text |= {"layer_types": text["layer_types"][: int(count)], "vocab_size": 32768}
        text["num_kv_shared_layers"] = 0  # the last layers are not part of it
    if shape == "12b":
        return transformers.Gemma4UnifiedConfig(
            text_config=text,
            tie_word_embeddings=True,
            architectures=["Gemma4UnifiedForConditionalGeneration"],
            dtype="bfloat16",
        )
    tiny = shape == "tiny"
    special = ("boi", "image", "eoi", "boa", "audio", "video")
    ids = {f"{name}_token_id": 500 + i for i, name in enumerate(special)} if tiny else {}
    return transformers.Gemma4Config(
        text_config=text,
        vision_config={**(TINY_VISION if tiny else {}), "use_clipped_linears": True},
        audio_config={**(TINY_AUDIO if tiny else {}), "use_clipped_linears": True},
        tie_word_embeddings=True,
        architectures=["Gemma4ForConditionalGeneration"],
        dtype="bfloat16",
        **({"eoa_token_index": 510} if tiny else {}),
        **ids,
    )


def _meta_model(shape: str) -> Any:
    import torch
    import transformers

    config = config_of(shape)
    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])(config).to(torch.bfloat16)


@cache
def parameters(shape: str) -> dict[str, int]:
    """Numbers of parameters: of the decoder layers, of those without experts, of those that one
    token uses, and of the head; and the width of all heads of the full-attention layers.
    """
    text = config_of(shape).get_text_config()
    named = _meta_model(shape).named_parameters()
    layers = {name: each.numel() for name, each in named if ".language_model.layers." in name}
    experts = sum(number for name, number in layers.items() if ".experts." in name)
    dense = sum(layers.values()) - experts
    used = experts * TEXT[shape].get("top_k_experts", 0) // TEXT[shape].get("num_experts", 1)
    full = text.layer_types.count("full_attention")
    return {
        "layers": dense + experts,
        "dense": dense,
        "used": dense + used,
        "head": text.vocab_size * text.hidden_size,
        "attention": full * text.num_attention_heads * TEXT[shape].get("global_head_dim", 512),
    }


def _fill(name: str, shape: tuple[int, ...]) -> Any:
    """A bfloat16 tensor on the CPU that keeps activations finite, generated on a GPU if any."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    leaf = name.rpartition(".")[2]
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if leaf.endswith(("_min", "_max")):
        tensor.fill_(-8.0 if leaf.endswith("_min") else 8.0)
    elif len(shape) > 1:
        tensor.normal_(0, 0.02)
    else:
        ones = ("weight", "layer_scalar", "scale", "per_expert_scale")
        tensor.fill_(1.0 if leaf in ones else 0.0)
    return tensor.cpu()


def describe(shape: str, folder: Path) -> None:
    """Write the config, and the adapters of ``plan``, unless they exist: no weights."""
    if not (folder / "model" / "config.json").exists():
        (folder / "model").mkdir(parents=True, exist_ok=True)
        if getattr(config_of(shape).get_text_config(), "num_experts", None):
            _build_adapter(_meta_model(shape), folder / "experts", str(folder / "model"), **EXPERTS)
        config_of(shape).save_pretrained(folder / "model")


def build(shape: str, folder: Path) -> None:
    """Write checkpoint and adapter into ``folder``, unless both are complete."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    done = folder / "complete"
    if done.exists():
        return
    describe(shape, folder)
    model = _meta_model(shape)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    del shapes["lm_head.weight"]  # tied to embed_tokens
    shards: list[list[str]] = [[]]
    size = 0
    for name, dimensions in shapes.items():
        size += 2 * math.prod(dimensions)
        if size > _SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 2 * math.prod(dimensions)
        shards[-1].append(name)

    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]

    def write(file: str, names: list[str]) -> None:
        tensors = {name: _fill(name, shapes[name]) for name in names}
        save_file(tensors, folder / "model" / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, files, shards))
    index = {
        "metadata": {"total_size": 2 * sum(map(math.prod, shapes.values()))},
        "weight_map": {n: file for file, names in zip(files, shards, strict=True) for n in names},
    }
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    text = model.config.text_config
    GenerationConfig(
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        do_sample=False,
    ).save_pretrained(folder / "model")
    _build_adapter(model, folder / "adapter", str(folder / "model"))
    done.touch()


def _build_adapter(model: Any, path: Path, base: str, **options: Any) -> None:
    """LoRA of rank 16 on every linear layer of the decoder; ``model`` is on meta."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file

    options = {"r": 16, "lora_alpha": 32, "target_modules": TARGETS, **options}
    config = LoraConfig(task_type="CAUSAL_LM", **options)
    with torch.device("meta"):
        model = get_peft_model(model, config)
    random = {n: 0.01 * torch.randn(p.shape) for n, p in model.named_parameters() if "lora_" in n}
    state = get_peft_model_state_dict(model, state_dict=random, save_embedding_layers=False)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(path))
    save_file(state, path / "adapter_model.safetensors", metadata={"format": "pt"})


def machine(shape: str) -> dict[str, Any]:
    """The shape, the GPU, the date and the versions of a measurement."""
    import torch

    from gemma4_compat.versions import WITH_TORCH

    cuda = torch.cuda.is_available()
    return {
        "shape": shape,
        "device": torch.cuda.get_device_name(0) if cuda else None,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in WITH_TORCH},
        "pinned GB/s": _bandwidth() if cuda else None,
    }


def _bandwidth() -> float | None:
    try:
        return pinned_bandwidth()
    except RuntimeError:  # memory cannot be pinned on this machine
        return None


def main(cache: str, shape: str = "auto") -> None:
    import torch

    if shape == "auto":
        shape = "e2b" if torch.cuda.is_available() else "tiny"
    if cache == "--count":
        model = _meta_model(shape)
        print(f"{shape}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} G parameters")
        return
    build(shape, Path(cache) / shape)
    print(json.dumps({"case": "machine", **machine(shape)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
