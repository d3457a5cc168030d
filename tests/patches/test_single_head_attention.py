"""Attention over a single KV head is right on a GPU, for every length."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gemma4_compat.patches.attention import single_head_attention as patch
from tests.patches.test_cudnn_attention import make

#: lengths around blocks of 32 tokens; 1 modulo 32 is the one that the kernel misreads
LENGTHS = [32, 33, 34, 65, 129]
HEADS = 4


def sdpa(*args, **kwargs):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **kwargs)


def attention(length, head_size=64, dtype=torch.bfloat16, *, padded=1, queries=None):
    """What transformers computes, and the same in float32 on the CPU, with the gradients."""
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS
    torch.manual_seed(0)
    queries = queries or length
    # small enough that several keys count
    query = torch.randn(2, HEADS, queries, head_size).div(head_size**0.5 / 4).to(dtype)
    keys = [torch.randn(2, 1, length, head_size).to(dtype) for _ in range(2)]
    mask = torch.ones(2, 1, queries, length, dtype=torch.bool).tril(length - queries)
    mask[1, :, :, :padded] = False
    mask[1, :, :padded, padded] = True  # else a row has no key
    results = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float32)):
        inputs = [tensor.to(device, kind).detach().requires_grad_() for tensor in (query, *keys)]
        output = sdpa(module, *inputs, mask.to(device), scaling=1.0)[0]
        output.float().square().sum().backward()
        results.append([t.detach().float().cpu() for t in (output, *(i.grad for i in inputs))])
    return results


def error(pair):
    """The largest difference, relative to the largest value."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*pair, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("head_size", [256, 512])
def test_a_padded_batch(head_size):
    """As in generation, without gradients."""
    queries, keys, values = (
        torch.randn(2, heads, 33, head_size, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, 1, 1)
    )
    mask = torch.ones(2, 1, 33, 33, dtype=torch.bool, device="cuda").tril()
    mask[1, :, :, :3] = False
    mask[1, :, :3, 3] = True  # else a row has no key
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS
    with torch.no_grad():
        output = sdpa(module, queries, keys, values, mask, scaling=1.0)[0]
        exact = (tensor.float().cpu() for tensor in (queries, keys, values))
        expected = sdpa(module, *exact, mask.cpu(), scaling=1.0)[0]
    off = float((output.float().cpu() - expected).abs().max())
    assert off < 0.05, f"length 33: off by {off}"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [64, 256, 512])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(length, head_size, dtype):
    # bfloat16 has 8 bits: the sum over the keys is off by some 2**-8.  float32 may use TF32.
    assert error(attention(length, head_size, dtype)) < 0.05


@pytest.mark.cuda
@pytest.mark.parametrize("head_size", [256, 512])
def test_a_step_of_decoding(head_size):
    assert error(attention(65, head_size, queries=1, padded=0)) < 0.05


def model_of(head_size):
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"], num_attention_heads=4,
        num_key_value_heads=1, head_dim=head_size, global_head_dim=2 * head_size,
        sliding_window=16, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


@torch.no_grad()
def logits(model, cached, tokens, static=False):
    """The logits of some tokens, after others that are in the cache."""
    from transformers import DynamicCache, StaticCache

    cache = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=cached + tokens + 30)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 96, (1, cached + tokens), generator=generator).to(model.device)
    if cached:
        model(input_ids=ids[:, :cached], past_key_values=cache, use_cache=True)
    return model(input_ids=ids[:, cached:], past_key_values=cache, use_cache=True).logits.cpu()


def assert_right(cached, tokens, head_size=256, static=False):
    """Both in float32; TF32 and the order of sums differ."""
    model = model_of(head_size)
    expected = logits(model, cached, tokens, static)
    off = float((logits(model.to("cuda"), cached, tokens, static) - expected).abs().max())
    off /= float(expected.abs().max())
    assert off < 0.02, f"{tokens} tokens: off by {off}"


@pytest.mark.cuda
@pytest.mark.regression("single_head_attention", r"65 tokens: off by \d")
def test_a_prompt_that_is_longer_than_the_window():
    """Without padding, a sliding layer has a mask once the prompt is longer than its window."""
    assert_right(0, 65)


@pytest.mark.cuda
@pytest.mark.regression("single_head_attention", r"65 tokens: off by \d")
def test_a_second_turn():
    """Its number of keys is another one."""
    assert_right(40, 65)


@pytest.mark.cuda
def test_after_cached_tokens():
    """All cases in one test, since a sample of the tests has one set of parameters of each."""
    for case in product((32, 40), (33, 64, 65, 129), (64, 128, 256), (False, True)):
        assert_right(*case)


@pytest.mark.cuda
def test_another_kernel_first():
    """What is known of one kernel does not count for another one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    assert_right(0, 65)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert_right(0, 65)


@pytest.mark.cuda
def test_other_lengths_are_not_copied():
    from transformers.integrations.sdpa_attention import repeat_kv

    for length in (32, 34, 64):
        assert repeat_kv(torch.ones(1, 1, length, 64, device="cuda"), 4).stride(1) == 0


@pytest.mark.cuda
def test_a_compiled_forward():
    from transformers.integrations.sdpa_attention import repeat_kv

    compiled = torch.compile(lambda keys: repeat_kv(keys, 4) * 2, backend="eager", fullgraph=True)
    keys = torch.randn(1, 1, 33, 64, device="cuda")
    assert torch.equal(compiled(keys), 2 * keys.expand(1, 4, 33, 64))


def test_on_the_cpu_nothing_is_copied():
    from transformers.integrations.sdpa_attention import repeat_kv

    assert repeat_kv(torch.ones(1, 1, 33, 64), 4).stride(1) == 0


def test_layers_say_the_number_of_queries(monkeypatch):
    """While they run, also in a compiled model, and no longer after an error."""
    model, seen = make().eval(), []
    usual = torch.nn.functional.scaled_dot_product_attention

    def own(query, *args, **kwargs):
        seen.append((patch._layer().queries, query.shape[2]))
        return usual(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", own)
    logits(model, 40, 65)
    assert seen == [(40, 40)] * 2 + [(65, 65)] * 2
    layer, other = model.model.layers[0].self_attn, make().eval()
    hook = layer.v_norm.register_forward_pre_hook(lambda *_: other(torch.tensor([[5, 6]])) and None)
    logits(model, 0, 33)
    assert seen[-2:] == [(33, 33)] * 2, "after another model ran inside a layer"
    hook.remove()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found, usual_logits = (each(torch.arange(5, 38)[None]).logits for each in (compiled, model))
    torch.testing.assert_close(found, usual_logits)
    assert patch._layer().queries == 0
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    with pytest.raises(TypeError):
        logits(model, 0, 33)
    assert patch._layer().queries == 0
