"""A tiny Gemma 4 unified model whose image tokens attend to each other."""

from __future__ import annotations

import pytest
import torch

_IMAGE = 501


@pytest.fixture
def unified_model():
    pytest.importorskip("transformers.models.gemma4_unified")
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    config = Gemma4UnifiedConfig(
        text_config={
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "global_head_dim": 128,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "use_bidirectional_attention": "vision",
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
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
        image_token_id=_IMAGE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma4UnifiedForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.eval()


def unified_generated(model, image=True, **options):
    ids = torch.tensor([[2, 7, 8, 9, *[_IMAGE if image else 9] * 4, 10, 11, 12, 13]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == _IMAGE).long(),
    }
    if image:
        generator = torch.Generator().manual_seed(1)
        inputs["pixel_values"] = torch.rand(1, 4, 16 * 16 * 3, generator=generator)
        inputs["image_position_ids"] = torch.tensor([[[0, 0], [0, 1], [1, 0], [1, 1]]])
    output = model.generate(
        **inputs,
        **options,
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits)
