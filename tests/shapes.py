"""The shapes of released Gemma 4 models, as config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.checkpoint import TEXT, layers

#: the text configs of E2B and E4B
E2B_TEXT, E4B_TEXT = (
    {**TEXT[shape], "num_hidden_layers": layers(shape)} for shape in ("e2b", "e4b")
)
VISION = {"hidden_size": 768, "num_hidden_layers": 16, "use_clipped_linears": True}
AUDIO = {"hidden_size": 1024, "num_hidden_layers": 12, "use_clipped_linears": True}


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
