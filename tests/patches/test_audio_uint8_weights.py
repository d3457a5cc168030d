"""A model processes audio when its audio tower is quantized as well."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import audio_inputs
from tests.support import assert_same, dequantized, load_model, logits, split

KINDS = ["nf4", "nf4-nested", "int8"]
FINFO = r"torch.finfo\(\) requires a floating point input type"


def quantized(model_dir, kind):
    model = load_model(model_dir, kind, llm_int8_skip_modules=["lm_head"])
    layer = model.model.audio_tower.layers[0]
    assert not layer.self_attn.post.linear.weight.dtype.is_floating_point
    return model


def features(model):
    """Return the audio features of the tower: float32, (tokens, hidden)."""
    inputs = audio_inputs(model.config)
    with torch.no_grad():
        found = model.model.audio_tower(
            inputs["input_features"], inputs["input_features_mask"], return_dict=True
        )
    return found.last_hidden_state.float()


@pytest.mark.regression("audio_uint8_weights", FINFO, then="cpu_strided_input")
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_tower_computes_what_its_weights_say(model_dir, kind):
    """The reference has the same weights, dequantized.  It lacks the rounding of the activations to
    bfloat16 (2 ** -8) or to int8 (2 ** -7) in two layers."""
    found = features(quantized(model_dir, kind))
    expected = features(dequantized(quantized(model_dir, kind)))
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < 0.1, f"audio features are off by {error:.0%}"


def test_offloaded_quantized_tower(model_dir, tmp_path):
    expected = logits(quantized(model_dir, "nf4-nested"), ["audio"])
    model = split(quantized(model_dir, "nf4-nested"), tmp_path)
    for _ in range(2):
        assert_same(logits(model, ["audio"]), expected)


def test_adapter_on_quantized_tower(model_dir, adapter_dir):
    from peft import PeftModel

    model = quantized(model_dir, "nf4")
    base = features(model)
    model = PeftModel.from_pretrained(model, adapter_dir).eval()
    found = logits(model, ["audio"])
    assert found["audio"].isfinite().all()
    with model.disable_adapter():
        assert torch.equal(features(model.base_model.model), base)


def test_unquantized_tower_is_untouched(model_dir):
    import gemma4_compat

    model = load_model(model_dir)
    expected = features(model)
    with gemma4_compat.disabled("audio_uint8_weights"):
        assert torch.equal(features(model), expected)
