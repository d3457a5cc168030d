"""A tiny model with the architecture of 12B, 26B and 31B.

No layer shares its keys and values with another, and image tokens attend to each other in both
directions.
"""

from __future__ import annotations

import torch

SLIDING_WINDOW = 8


def large_config(model_dir, **text):
    """The tiny checkpoint's configuration with the changes of a large model."""
    from transformers import Gemma4Config

    config = Gemma4Config.from_pretrained(model_dir)
    changes = {
        "num_kv_shared_layers": 0,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        **text,
    }
    for name, value in changes.items():
        setattr(config.text_config, name, value)
    assert config.text_config.sliding_window == SLIDING_WINDOW
    return config


def large_model(model_dir, cls=None, dtype=torch.float32, **text):
    """A model with the same random weights in each call; its outputs depend on every input."""
    from transformers import Gemma4ForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (cls or Gemma4ForConditionalGeneration)(large_config(model_dir, **text))
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                torch.nn.init.constant_(parameter, 0.3)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()
