"""The shapes of released Gemma 4 models, as config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

E2B_TEXT = {
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 20,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
VISION = {"hidden_size": 768, "num_hidden_layers": 16, "use_clipped_linears": True}
AUDIO = {"hidden_size": 1024, "num_hidden_layers": 12, "use_clipped_linears": True}
E4B_TEXT = {
    **E2B_TEXT,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "use_double_wide_mlp": False,
    "num_hidden_layers": 42,
    "num_kv_shared_layers": 18,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    "num_key_value_heads": 2,
}


def write_config(
    folder: Path,
    text: dict[str, Any],
    vision: dict[str, Any] | None = None,
    audio: dict[str, Any] | None = None,
) -> Path:
    from transformers import Gemma4Config

    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=audio)
    config.architectures = ["Gemma4ForConditionalGeneration"]
    config.save_pretrained(folder)
    return folder
