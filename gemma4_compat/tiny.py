"""A tiny random Gemma 4 multimodal checkpoint, inputs for it, and LoRA adapters for it.

The name of a tensor seeds the generator of its values, so every transformers version writes files
with the same values.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from transformers import Gemma4Config

TOWERS = ("model.vision_tower", "model.audio_tower")

BROAD_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# bitsandbytes' AVX512-BF16 path needs in_features in multiples of 128 and out_features in
# multiples of 32; all linear layers below have such sizes.
_WIDTH = 128
_VOCAB = 512
_FIRST_SPECIAL_TOKEN = 500
_LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_KV_SHARED_LAYERS = 3
_FIRST_SHARED_LAYER = len(_LAYER_TYPES) - _KV_SHARED_LAYERS

# KV-shared layers have no key and value projections of their own, so the adapter has no tensors
# for them.  (Some transformers versions create these modules, but do not use them.)
LANGUAGE_TARGETS = (
    r".*\.language_model\.layers\."
    rf"(\d+\..*\.(q|o|gate|up|down)_proj|[0-{_FIRST_SHARED_LAYER - 1}]\.self_attn\.[kv]_proj)"
)
INNER_TARGETS = (
    rf"{LANGUAGE_TARGETS}|.*\.(vision_tower|audio_tower)\..*\.({'|'.join(BROAD_TARGETS)})\.linear"
)


def _config() -> Gemma4Config:
    from transformers import Gemma4Config

    text = {
        "vocab_size": _VOCAB,
        "vocab_size_per_layer_input": _VOCAB,
        "hidden_size": _WIDTH,
        "hidden_size_per_layer_input": _WIDTH,
        "intermediate_size": _WIDTH,
        "use_double_wide_mlp": True,
        "num_hidden_layers": len(_LAYER_TYPES),
        "num_kv_shared_layers": _KV_SHARED_LAYERS,
        "layer_types": list(_LAYER_TYPES),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "global_head_dim": 128,
        "sliding_window": 8,
        "max_position_embeddings": 1024,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    vision = {
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 32,
        "use_clipped_linears": True,
    }
    audio = {
        "hidden_size": _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        # The first number is also the number of mel bins of the model's inputs.
        "subsampling_conv_channels": [32, 16],
        "output_proj_dims": _WIDTH,
        "use_clipped_linears": True,
    }
    return Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        tie_word_embeddings=True,
        boi_token_id=_FIRST_SPECIAL_TOKEN,
        image_token_id=501,
        eoi_token_id=502,
        boa_token_id=503,
        audio_token_id=504,
        eoa_token_index=505,
        video_token_id=506,
    )


def _generator(name: str, seed: int = 0) -> Generator:
    import torch

    return torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))


def _random_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Random bfloat16 values for the tensor `name`, scaled to keep activations near 1."""
    import torch

    generator = _generator(name)
    leaf = name.rpartition(".")[2]

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    if leaf in ("input_min", "input_max", "output_min", "output_max"):
        # The bounds are so narrow that every clipped linear clips.  The activations before and
        # after the last linear of an MLP are much smaller.
        narrow = 0.1 if ".down_proj." in name or ".ffw_layer_2." in name else 1.0
        value = uniform(0.2, 1.0) * narrow * (1.0 if leaf.endswith("max") else -1.0)
    elif leaf == "layer_scalar":
        value = uniform(0.75, 0.95)  # fades the token's own embedding: else tokens repeat
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        value = uniform(0.2, 0.4)  # Gemma 4 does not scale q.k; this keeps the softmax soft
    elif name.endswith("language_model.norm.weight"):
        value = uniform(2.0, 4.0)  # spreads the logits
    elif len(shape) == 1 and leaf == "weight":
        value = uniform(0.5, 1.5)
    elif len(shape) == 1:
        value = 0.1 * torch.randn(shape, generator=generator)
    elif leaf == "position_embedding_table":
        value = 0.5 * torch.randn(shape, generator=generator)
    else:
        # Embeddings are multiplied by sqrt(_WIDTH) in the model.
        fan_in = _WIDTH if "embed_tokens" in name else torch.Size(shape[1:]).numel()
        value = torch.randn(shape, generator=generator) * fan_in**-0.5
    return value.to(torch.bfloat16)


def build_checkpoint(path: Path) -> Path:
    """Write a random `Gemma4ForConditionalGeneration` checkpoint of a few MB to `path`.

    It has six text layers of width 128, and the last three share the keys and values of the first
    three (each three have sliding and full attention). It has per-layer embeddings, tied
    embeddings, two vision layers and two audio layers; the bounds of their clipped linears are
    finite and do clip. All tensors are bfloat16.
    """
    import torch
    from transformers import Gemma4ForConditionalGeneration, GenerationConfig

    with torch.random.fork_rng(devices=[]):
        model = Gemma4ForConditionalGeneration(_config()).to(torch.bfloat16)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    del shapes["lm_head.weight"]  # tied to embed_tokens
    # Checkpoints have keys and values of the KV-shared layers, too, but transformers skips them.
    for leaf in ("k_proj", "v_proj", "k_norm"):
        name = f"model.language_model.layers.{{}}.self_attn.{leaf}.weight"
        for index in range(_KV_SHARED_LAYERS):  # the shared layers have the types of these layers
            shapes[name.format(_FIRST_SHARED_LAYER + index)] = shapes[name.format(index)]
    state = {name: _random_tensor(name, shapes[name]) for name in sorted(shapes)}

    model.generation_config = GenerationConfig(
        bos_token_id=2, eos_token_id=1, pad_token_id=0, do_sample=False
    )
    model.save_pretrained(path, state_dict=state)
    return path


def _prompt(
    config: Gemma4Config, batch: int, words: int, seed: int, *middle: int, soft_type: int = 0
) -> dict[str, Tensor]:
    """Random tokens, none of them special, with ``middle`` after the third one.

    The tokens in ``middle``, except the first and the last, are soft tokens of this type.
    """
    import torch

    generator = _generator("tokens", seed)
    ids = torch.randint(3, _FIRST_SPECIAL_TOKEN, (batch, words), generator=generator)
    bos = torch.full((batch, 1), config.text_config.bos_token_id)
    inserted = torch.tensor(middle, dtype=torch.int64).expand(batch, -1)
    input_ids = torch.cat([bos, ids[:, :3], inserted, ids[:, 3:]], dim=1)
    token_types = torch.zeros_like(input_ids)
    token_types[:, 5 : 3 + len(middle)] = soft_type  # after bos, three tokens and the first one
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": token_types,
    }


def text_inputs(config: Gemma4Config, *, batch: int = 1) -> dict[str, Tensor]:
    """Text alone, longer than the sliding window.

    `input_ids`, `attention_mask` and `mm_token_type_ids`, int64 [batch, 12].
    """
    return _prompt(config, batch, 11, 1)


def image_inputs(config: Gemma4Config, *, batch: int = 1) -> dict[str, Tensor]:
    """One image per row: 6 x 6 patches, pooled to 4 soft tokens, between text.

    `input_ids`, `attention_mask` and `mm_token_type_ids` (1 at soft tokens), int64 [batch, 13];
    `pixel_values`, float32 in [0, 1) [batch, 36, 768]; `image_position_ids`, the (x, y) of each
    patch, int64 [batch, 36, 2].
    """
    import torch

    vision = config.vision_config
    side = 2 * vision.pooling_kernel_size
    image = [config.image_token_id] * 4
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    positions = torch.stack([x, y], dim=-1).reshape(1, side * side, 2)
    pixels = (batch, side * side, 3 * vision.patch_size**2)
    middle = (config.boi_token_id, *image, config.eoi_token_id)
    return {
        **_prompt(config, batch, 6, 2, *middle, soft_type=1),
        "pixel_values": torch.rand(pixels, generator=_generator("pixels")),
        "image_position_ids": positions.repeat(batch, 1, 1),
    }


def audio_inputs(config: Gemma4Config, *, batch: int = 1) -> dict[str, Tensor]:
    """One sound per row: 56 mel frames, subsampled to 14 soft tokens, between text.

    `input_ids`, `attention_mask` and `mm_token_type_ids` (3 at soft tokens), int64 [batch, 23];
    `input_features`, float32 [batch, 56, 32]; `input_features_mask`, bool [batch, 56].
    """
    import torch

    # More soft tokens than one attention chunk (12), so that attention runs in chunks.
    audio = [config.audio_token_id] * (config.audio_config.attention_chunk_size + 2)
    frames = 4 * len(audio)
    mel_bins = config.audio_config.subsampling_conv_channels[0]
    middle = (config.boa_token_id, *audio, config.eoa_token_index)
    return {
        **_prompt(config, batch, 6, 3, *middle, soft_type=3),
        "input_features": torch.randn((batch, frames, mel_bins), generator=_generator("features")),
        "input_features_mask": torch.ones((batch, frames), dtype=torch.bool),
    }


def build_adapter(
    path: Path, model_dir: Path, *, rank: int = 4, seed: int = 0, targets: str | None = None
) -> Path:
    """Write a PEFT LoRA adapter for the checkpoint in `model_dir` to `path`.

    `lora_A` is float32 [rank, in_features], `lora_B` float32 [out_features, rank]; neither is zero.
    Its `target_modules` are `targets`, a regular expression of layers that PEFT alone can adapt.
    By default they are `BROAD_TARGETS`, which name the wrappers of the towers' layers: such an
    adapter loads only if PEFT supports them.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma4ForConditionalGeneration

    base = Gemma4ForConditionalGeneration.from_pretrained(model_dir, dtype=torch.bfloat16)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules=targets or INNER_TARGETS,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                std = parameter.shape[1] ** -0.5 * (1.0 if "lora_A" in name else 0.08)
                noise = torch.randn(parameter.shape, generator=_generator(name, seed))
                parameter.copy_(std * noise)
    if targets is None:
        config.target_modules = list(BROAD_TARGETS)
    model.save_pretrained(path)
    return path
