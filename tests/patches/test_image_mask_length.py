"""An image after cached tokens, in a model whose image tokens attend to each other."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.model.caches import cache_name
from gemma4_compat.tiny import image_inputs
from tests.large_model import SLIDING_WINDOW, large_model
from tests.patches.test_sliding_cache_layers import assert_close

PIXELS = ("pixel_values", "image_position_ids")
GREEDY = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def generated(model, inputs, **options):
    options |= GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    return torch.stack(model.generate(**inputs, **options).logits)


@pytest.mark.regression(
    "image_mask_length", r"The size of tensor a \(\d+\) must match the size of tensor b"
)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_second_turn_of_a_chat(model_dir, batch):
    """It has the logits of both turns at once."""
    from transformers import DynamicCache

    model = large_model(model_dir)
    first = image_inputs(model.config, batch=batch)
    assert first["input_ids"].shape[1] > SLIDING_WINDOW
    tokens = {name: each for name, each in first.items() if name not in PIXELS}
    tokens = {name: torch.cat([each, each], dim=1) for name, each in tokens.items()}
    pixels = {name: first[name] for name in PIXELS}
    twice = {name: each.repeat_interleave(2, dim=0) for name, each in pixels.items()}
    expected = generated(model, tokens | twice)
    cache = DynamicCache(config=model.config.get_text_config())
    with torch.no_grad():
        model(**first, **{cache_name(): cache})
    found = generated(model, tokens | pixels, **{cache_name(): cache})
    assert_close(found, expected)
