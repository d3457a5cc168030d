"""Images survive chunked prefill in Gemma 3n, and sound is refused.

The vision tower is a convolution in place of timm's, which is not installed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.patches.test_chunked_prefill_images import IGNORED, assert_equal, generated
from tests.patches.test_gradient_accumulation import gemma3n

IMAGE, AUDIO = 500, 510


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)

    def forward(self, pixel_values, **kwargs):
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(last_hidden_state=self.patches(pixel_values))


def model_of(model_dir):
    model = gemma3n(model_dir).eval()
    config = model.config
    config.image_token_id, config.audio_token_id = IMAGE, AUDIO
    config.vision_soft_tokens_per_image, config.audio_soft_tokens_per_image = 4, 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.model.vision_tower = Tower(config.vision_config.hidden_size)
    return model


def prompt(token):
    ids = torch.tensor([[2, 7, 8, *[token] * 4, 9, 10, 11, *[token] * 4, 12, 13]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.regression("gemma3n_chunked_prefill_images", IGNORED)
def test_two_images(model_dir):
    model = model_of(model_dir)
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    inputs = {**prompt(IMAGE), "pixel_values": pixels}
    expected = generated(model, inputs)
    other = {**inputs, "pixel_values": pixels.flip(0)}
    assert not torch.equal(generated(model, other), expected)
    for size in (5, 8, 100):
        assert_equal(generated(model, inputs, prefill_chunk_size=size), expected)


def test_sound_is_refused(model_dir):
    model = model_of(model_dir)
    bins = model.config.audio_config.input_feat_size
    inputs = {
        **prompt(AUDIO),
        "input_features": torch.randn(2, 32, bins, generator=torch.Generator().manual_seed(1)),
        "input_features_mask": torch.ones(2, 32, dtype=torch.bool),
    }
    expected = generated(model, inputs)
    with pytest.raises(ValueError, match="Chunked prefill cannot split"):
        generated(model, inputs, prefill_chunk_size=5)
    assert_equal(generated(model, inputs, prefill_chunk_size=100), expected)
