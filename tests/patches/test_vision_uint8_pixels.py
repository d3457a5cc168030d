"""A model processes images when its vision tower is quantized as well."""

from __future__ import annotations

import copy

import pytest
import torch
from packaging.version import Version

from gemma4_compat.tiny import image_inputs
from tests.support import assert_same, dequantized, load_model, logits, quantization, split

KINDS = ["nf4", "nf4-nested", "int8"]
#: bitsandbytes quantizes all of the vision tower; the audio tower has its own patch.
VISION_TOO = {"llm_int8_skip_modules": ["model.audio_tower", "lm_head"]}


def quantized(model_dir, kind):
    model = load_model(model_dir, kind, **VISION_TOO)
    assert not embedder(model).input_proj.weight.dtype.is_floating_point
    return model


def embedder(model):
    return model.model.vision_tower.patch_embedder


def features(model, dtype=torch.bfloat16):
    """Return the image features of the tower: float32, (tokens, hidden)."""
    inputs = image_inputs(model.config)
    with torch.no_grad():
        found = model.model.vision_tower(
            inputs["pixel_values"].to(dtype), inputs["image_position_ids"]
        )
    return found.last_hidden_state.float()


def given_float_pixels(model):
    """The same model with a patch embedder that projects floating-point pixels."""
    module = embedder(model)

    def forward(pixel_values, pixel_position_ids, padding_positions):
        pixels = (2 * (pixel_values - 0.5)).to(torch.bfloat16)
        positions = module._position_embeddings(pixel_position_ids, padding_positions)
        return module.input_proj(pixels) + positions

    module.forward = forward
    return model


@pytest.mark.regression("vision_uint8_pixels", r"image features differ")
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_floating_point_pixels(model_dir, kind):
    model = quantized(model_dir, kind)
    found = features(model)
    again = features(model)
    expected = features(given_float_pixels(model))
    assert torch.equal(found, expected), "image features differ"
    assert torch.equal(again, expected)


@pytest.mark.regression("vision_uint8_pixels", r"image logits differ")
def test_logits_of_float32_pixels(model_dir):
    """Processors return float32 pixels."""
    import transformers

    if Version(transformers.__version__) >= Version("5.13"):
        pytest.skip("there the tower computes with the dtype of the pixels")
    model = quantized(model_dir, "nf4")
    assert image_inputs(model.config)["pixel_values"].dtype == torch.float32
    found = logits(model, ["image"])
    assert_same(found, logits(given_float_pixels(model), ["image"]))


@pytest.mark.regression("vision_uint8_pixels", r"the images are lost")
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_tower_computes_what_its_weights_say(model_dir, kind):
    """The reference has the same weights, dequantized.  It lacks the rounding of the activations to
    bfloat16 (2 ** -8) or to int8 (2 ** -7) in two layers."""
    found = features(quantized(model_dir, kind))
    expected = features(dequantized(quantized(model_dir, kind)))
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < 0.1, f"the images are lost: features are off by {error:.0%}"


def test_offloaded_quantized_tower(model_dir, tmp_path):
    expected = features(given_float_pixels(quantized(model_dir, "nf4")))
    model = split(quantized(model_dir, "nf4"), tmp_path)
    assert embedder(model).input_proj.weight.is_meta
    for _ in range(2):
        assert torch.equal(features(model), expected), "image features differ"


def test_unquantized_tower_is_untouched(model_dir):
    model = load_model(model_dir)
    expected = features(model)
    assert torch.equal(features(given_float_pixels(copy.deepcopy(model))), expected)


@pytest.fixture(scope="module")
def unified_dir(tmp_path_factory):
    pytest.importorskip("transformers.models.gemma4_unified")
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    torch.manual_seed(0)
    config = Gemma4UnifiedConfig(
        text_config={
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "global_head_dim": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={
            "patch_size": 16,
            "pooling_kernel_size": 1,
            "model_patch_size": 16,
            "mm_embed_dim": 128,
            "output_proj_dims": 128,
            "mm_posemb_size": 16,
        },
        audio_config={"audio_embed_dim": 128},
    )
    path = tmp_path_factory.mktemp("unified")
    Gemma4UnifiedForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(path)
    return path


def load_unified(unified_dir, kind):
    from transformers import Gemma4UnifiedForConditionalGeneration

    model = Gemma4UnifiedForConditionalGeneration.from_pretrained(
        unified_dir,
        quantization_config=quantization(kind, llm_int8_skip_modules=["lm_head"]),
        device_map={"": "cpu"},
        dtype=torch.bfloat16,
    )
    return model.eval().model


def vision_features(model):
    torch.manual_seed(1)
    pixels = torch.rand(1, 4, 16 * 16 * 3).to(torch.bfloat16)
    positions = torch.tensor([[[0, 0], [0, 1], [1, 0], [-1, -1]]])
    embedder = getattr(model, "vision_embedder", None) or model.embed_vision
    found = embedder(pixels, positions)
    return getattr(found, "pooler_output", found).float()


def audio_features(model):
    torch.manual_seed(1)
    return model.embed_audio(torch.randn(1, 5, 128).to(torch.bfloat16)).float()


@pytest.mark.regression("vision_uint8_pixels", r"features are off|mixed dtype \(CPU\)")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("features", [vision_features, audio_features])
@torch.no_grad()
def test_quantized_embedders_compute_what_their_weights_say(unified_dir, kind, features):
    """The reference is dequantized; see above for the tolerance."""
    found = features(load_unified(unified_dir, kind))
    expected = features(dequantized(load_unified(unified_dir, kind)))
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < 0.1, f"features are off by {error:.0%}"
