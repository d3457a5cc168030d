"""Sliding layers compute a long prompt in parts."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import gemma4_compat
from gemma4_compat.patches.attention import _sdpa
from gemma4_compat.patches.attention import sliding_prompt_attention as patch
from tests.patches.test_cudnn_attention import make
from tests.patches.test_one_token_attention import plain_on_the_cpu

SDPA = "aten::scaled_dot_product_attention"
WINDOW = 512


def ids_of(length, batch=1, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 96, (batch, length), generator=generator).to(device)


def keys_read(model, length):
    """How many keys PyTorch's attention gets, in the first layer, which slides."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(input_ids=ids_of(length, device=model.device))
    shapes = [each.input_shapes[1] for each in profiler.events() if each.name == SDPA]
    last = -1 if "Gemma3n" in type(model).__name__ else None  # whose full layers have heads of 256
    return [shape[2] for shape in shapes if shape[3] == 256][:last]


def pretend(monkeypatch):
    """On the CPU, prompts of 64 tokens are long; a window has 16."""
    monkeypatch.setattr(_sdpa, "plain", lambda: plain_on_the_cpu)
    monkeypatch.setattr(patch, "_LEAST", 64)
    monkeypatch.setattr(patch, "_PART", 16)
    monkeypatch.setattr(patch, "_ALIGNED", 4)


def assert_in_parts(model, length=4096):
    with torch.no_grad():
        most = max(keys_read(model.eval(), length))
    assert most <= length / 2, f"a sliding layer reads {most} keys at once"


@pytest.mark.regression("sliding_prompt_attention", r"reads 71 keys at once")
def test_a_long_prompt(monkeypatch):
    pretend(monkeypatch)
    assert_in_parts(make(), 71)


@pytest.mark.cuda
@pytest.mark.regression("sliding_prompt_attention", r"reads 4096 keys at once")
def test_a_long_prompt_on_a_gpu():
    assert_in_parts(make(window=WINDOW).to("cuda", torch.bfloat16))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_as_near_as_pytorch(dtype):
    """To the logits in float64; also after cached tokens, and with a part of one query."""
    for case in product((1, 2), ((0, 4097), (200, 4200), (0, 4129))):
        assert_near(*case, dtype)


def assert_near(kv_heads, lengths, dtype):
    model = make(kv_heads=kv_heads, window=WINDOW).to("cuda", dtype).eval()
    ids = ids_of(sum(lengths), device="cuda")

    def logits(model):
        cache = None
        with torch.no_grad():
            for part in ids.split([each for each in lengths if each], 1):
                output = model(input_ids=part, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
        return output.logits.double()

    assert_in_parts(model, lengths[-1])
    found = logits(model)
    with gemma4_compat.disabled("sliding_prompt_attention"):
        usual, exact = logits(model), logits(model.double())
    off, usually = (float((each - exact).norm() / exact.norm()) for each in (found, usual))
    assert off < 1.1 * usually + 1e-6, f"off by {off:.2g}, without the patch by {usually:.2g}"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_padding_on_a_gpu(dtype):
    """All scores are computed, with the same bits."""
    model = make(kv_heads=2, window=WINDOW).to("cuda", dtype).eval()
    ids, mask = ids_of(4100, 2, "cuda"), torch.ones(2, 4100, dtype=torch.long, device="cuda")
    mask[1, :1500] = 0
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask).logits
        with gemma4_compat.disabled("sliding_prompt_attention"):
            usual = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(found, usual) or not usual.isfinite().all()


# -- without a GPU --------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch):
    pretend(monkeypatch)


def both(model, **inputs):
    """The logits with and without the patch."""
    with torch.no_grad():
        found = model(**inputs).logits
        with gemma4_compat.disabled("sliding_prompt_attention"):
            return found, model(**inputs).logits


@pytest.mark.parametrize("kind", ["gemma4", "gemma3n", "unified"])
def test_in_parts(short, kind):
    model = make(kind=kind).eval()
    with torch.no_grad():
        assert keys_read(model, 71) == [16, 32, 32, 32, 23]
        assert keys_read(model, 63) == [63]
    torch.testing.assert_close(*both(model, input_ids=ids_of(71)))


@pytest.mark.parametrize("padded", [5, 40])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(short, side, padded):
    model, mask = make().eval(), torch.ones(3, 70, dtype=torch.long)
    mask[1, :padded] = 0
    if side == "right":
        mask = mask.flip(1)
    found, usual = both(model, input_ids=ids_of(70, 3), attention_mask=mask)
    torch.testing.assert_close(found[mask.bool()], usual[mask.bool()])
    assert found.isfinite().all()


def test_a_mask_of_the_user(short):
    """Each query sees some keys anywhere; then the same mask is changed in place."""
    model, attention = make().eval(), torch.rand(1, 1, 64, 64) < 0.1
    attention[..., 0] = True
    for _ in range(2):
        masks = {"full_attention": attention, "sliding_attention": attention}
        torch.testing.assert_close(*both(model, input_ids=ids_of(64), attention_mask=masks))
        attention.zero_().diagonal(dim1=2, dim2=3).fill_(True)


def test_other_keys_than_those_of_a_part_are_not_read(short):
    """The range of a part holds all keys that its mask holds, and few others."""
    mask = torch.zeros(2, 1, 64, 100, dtype=torch.bool)
    mask[0, 0, :16, 3:9] = True
    mask[1, 0, 15, 30] = True
    mask[0, 0, 16:32, 99] = True
    parts = patch._parts_of(mask)
    assert [(k.start, k.stop) for _, k in parts] == [(0, 32), (96, 100), (96, 100), (96, 100)]
    assert [(q.start, q.stop) for q, _ in parts] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert patch._parts(torch.ones(1, 1, 64, 64, dtype=torch.bool), 64, 64) is None
    assert patch._parts(mask.float(), 64, 100) is None
    assert patch._parts(None, 64, 100) is None


def test_with_gradients_it_stays_whole(short):
    model = make().train()
    assert keys_read(model, 71) == [71]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        model(input_ids=ids_of(71))


def test_a_cache_after_the_prompt(short):
    model, options = make().eval(), {"max_new_tokens": 5, "do_sample": False}
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[0, :9] = 0
    inputs = {"input_ids": ids_of(80, 2), "attention_mask": mask}
    for cache in (None, "static"):
        found = model.generate(**inputs, **options, cache_implementation=cache)
        with gemma4_compat.disabled("sliding_prompt_attention"):
            usual = model.generate(**inputs, **options, cache_implementation=cache)
        assert torch.equal(found, usual)


@pytest.mark.regression("sliding_prompt_attention", r"reads 71 keys at once")
def test_a_long_prompt_of_gemma3n(monkeypatch):
    pretend(monkeypatch)
    assert_in_parts(make(kind="gemma3n"), 71)


@pytest.mark.cuda
@pytest.mark.regression("sliding_prompt_attention", r"reads 4096 keys at once")
def test_a_long_prompt_on_a_gpu_of_gemma3n():
    assert_in_parts(make(kind="gemma3n", window=WINDOW).to("cuda", torch.bfloat16))


@pytest.mark.regression("sliding_prompt_attention", r"reads 71 keys at once")
def test_a_long_prompt_of_unified(monkeypatch):
    pretend(monkeypatch)
    assert_in_parts(make(kind="unified"), 71)


@pytest.mark.cuda
@pytest.mark.regression("sliding_prompt_attention", r"reads 4096 keys at once")
def test_a_long_prompt_on_a_gpu_of_unified():
    assert_in_parts(make(kind="unified", window=WINDOW).to("cuda", torch.bfloat16))
