"""Attention of the full-attention layers needs no memory for all scores."""

from __future__ import annotations

import pytest
import torch

HEADS, LENGTH, HEAD_SIZE = 8, 4096, 512


def attention(device, length=LENGTH, head_size=HEAD_SIZE):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = torch.nn.Module()
    module.num_key_value_groups = HEADS
    module.is_causal = True
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, length, head_size, generator=generator).to(device, torch.bfloat16)
        for heads in (HEADS, 1, 1)
    )
    return sdpa_attention_forward(module, query, key, value, None, scaling=1.0)[0]


@pytest.mark.cuda
@pytest.mark.regression("full_attention_memory", r"4096 tokens need \d{4} MiB")
def test_the_memory_of_a_prompt():
    attention("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention("cuda")
    needed = (torch.cuda.max_memory_allocated() - before) // 2**20
    # inputs, output and its copy: some 40 MiB each; all scores would be 512 MiB in float32
    assert needed < 256, f"{LENGTH} tokens need {needed} MiB"


@pytest.mark.cuda
def test_the_output():
    expected = attention("cpu", 256).float()
    output = attention("cuda", 256).float().cpu()
    # bfloat16 has 8 bits
    assert torch.allclose(output, expected, atol=0.02, rtol=0.02)


def test_smaller_heads_stay_in_groups():
    from transformers.integrations.sdpa_attention import use_gqa_in_sdpa

    for device in ("cpu", "meta"):
        key = torch.empty(1, 1, 4, 256, device=device)
        asked = (None, key, key) if "value" in use_gqa_in_sdpa.__code__.co_varnames else (None, key)
        assert use_gqa_in_sdpa(*asked)
