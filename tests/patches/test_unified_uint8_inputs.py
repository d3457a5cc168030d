"""A quantized Gemma 4 unified processes images and sound."""

from __future__ import annotations

import pytest
import torch

from tests.support import dequantized, quantization

pytest.importorskip("transformers.models.gemma4_unified")


@pytest.fixture(scope="module")
def unified_dir(tmp_path_factory):
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


def load(unified_dir, kind):
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


@pytest.mark.regression("unified_uint8_inputs", r"features are off|mixed dtype \(CPU\)")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("features", [vision_features, audio_features])
@torch.no_grad()
def test_quantized_embedders_compute_what_their_weights_say(unified_dir, kind, features):
    """The reference is dequantized; see test_vision_uint8_pixels for the tolerance."""
    found = features(load(unified_dir, kind))
    expected = features(dequantized(load(unified_dir, kind)))
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < 0.1, f"features are off by {error:.0%}"
