"""An explicit attn_implementation and the audio tower."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.support import assert_same, logits


def load(model_dir, **options):
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(
        model_dir, dtype=torch.bfloat16, **options
    ).eval()


@pytest.mark.regression("audio_attention", r"Gemma4AudioModel does not support an attention")
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_explicit_implementation_loads(model_dir, implementation, caplog):
    with caplog.at_level(logging.INFO, logger="gemma4_compat.patches.audio_attention"):
        model = load(model_dir, attn_implementation=implementation)
    language = model.model.language_model.config
    assert language._attn_implementation == implementation
    said = [r.message for r in caplog.records if "audio tower" in r.message]
    audio = model.model.audio_tower
    if audio._supports_sdpa:
        assert not said
    else:
        assert audio.config._attn_implementation == "eager"
        assert said == [
            f"the audio tower does not support {implementation} attention and uses eager"
        ]


def test_explicit_sdpa_is_the_default(model_dir):
    assert_same(logits(load(model_dir, attn_implementation="sdpa")), logits(load(model_dir)))


def test_explicit_dictionary_is_respected(model_dir):
    model = load(model_dir, attn_implementation={"": "sdpa", "audio_config": "eager"})
    assert model.model.audio_tower.config._attn_implementation == "eager"
    assert model.model.language_model.config._attn_implementation == "sdpa"
