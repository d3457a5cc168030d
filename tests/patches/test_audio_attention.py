"""A model with an audio tower accepts an explicit attn_implementation."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.support import assert_same, logits

REFUSED = r"Gemma4AudioModel does not support (an attention implementation through|Flash Attention)"


def load(model_dir, **options):
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(
        model_dir, dtype=torch.bfloat16, **options
    ).eval()


@pytest.mark.regression("audio_attention", REFUSED)
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_explicit_implementation_loads(model_dir, implementation, caplog):
    with caplog.at_level(logging.INFO, logger="gemma4_compat.patches"):
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
            f"the audio tower does not support {implementation} attention, so it uses eager"
        ]


def test_explicit_sdpa_is_the_default(model_dir):
    assert_same(logits(load(model_dir, attn_implementation="sdpa")), logits(load(model_dir)))


def test_explicit_dictionary_is_respected(model_dir):
    model = load(model_dir, attn_implementation={"": "sdpa", "audio_config": "eager"})
    assert model.model.audio_tower.config._attn_implementation == "eager"
    assert model.model.language_model.config._attn_implementation == "sdpa"


@pytest.mark.regression("audio_attention", REFUSED)
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_implementation_set_later(model_dir, implementation):
    model = load(model_dir, attn_implementation="eager")
    model.set_attn_implementation(implementation)
    assert model.model.language_model.config._attn_implementation == implementation
    audio = model.model.audio_tower
    if not audio._supports_sdpa:
        assert audio.config._attn_implementation == "eager"


def tower_alone(model_dir, implementation):
    """Create only the tower: in the whole model, flash attention needs a package and a GPU."""
    from transformers import AutoConfig, AutoModel
    from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioModel

    if Gemma4AudioModel._supports_sdpa:
        pytest.skip("this tower is not limited to eager attention")
    config = AutoConfig.from_pretrained(model_dir).audio_config
    return AutoModel.from_config(config, attn_implementation=implementation)


@pytest.mark.regression("audio_attention", REFUSED)
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention", "flash_attention_2"])
def test_tower_alone(model_dir, implementation):
    tower = tower_alone(model_dir, implementation)
    assert tower.config._attn_implementation == "eager"


def test_kernel_from_the_hub(model_dir):
    """The kernel is not downloaded, because the tower cannot use it."""
    tower = tower_alone(model_dir, "kernels-community/flash-attn")
    assert tower.config._attn_implementation == "eager"


def test_unknown_implementation_still_raises(model_dir):
    with pytest.raises((ValueError, KeyError), match="nonsense"):
        tower_alone(model_dir, "nonsense")
