"""The kernel that computes the attention of one token, against float64 and PyTorch's kernels."""

from __future__ import annotations

import statistics

import pytest
import torch

from gemma4_compat.runtime.kernels import compiler, launch
from gemma4_compat.runtime.kernels.compiler import KernelError
from gemma4_compat.runtime.kernels.one_token_attention import attention
from tests import support

pytestmark = pytest.mark.cuda

#: heads, key heads, size of a head: E2B, E4B, 26B-A4B, 31B, 12B, Gemma 3n; sliding and full layers
SHAPES = [
    (8, 1, 256), (8, 1, 512), (8, 2, 256), (8, 2, 512), (16, 8, 256), (16, 2, 512),
    (32, 16, 256), (32, 4, 512), (16, 1, 512), (2, 1, 64), (6, 2, 128), (5, 1, 32),
]  # fmt: skip
LENGTHS = (1, 2, 31, 128, 129, 512, 1500, 8192)
DTYPES = (torch.bfloat16, torch.float16)
#: Two kernels that round the same numbers differ by chance.
CHANCE = 1.01
SEEDS = 20
LARGE = 250.0  # scores of Gemma, which does not scale them


def randn(*shape, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def inputs(shape, length, dtype, seed, kind="random", batch=1):
    """Query, keys, values and mask."""
    heads, key_heads, size = shape
    query = randn(batch, heads, 1, size, dtype=dtype, seed=seed) / size**0.25
    key = randn(batch, key_heads, length, size, dtype=dtype, seed=seed + 1000) / size**0.25
    value = randn(batch, key_heads, length, size, dtype=dtype, seed=seed + 2000)
    mask = None
    if kind == "large":  # scores of +-250
        query = query * LARGE / 3
    elif kind == "dominant":  # one key has nearly all the weight
        key[:, :, seed % length] = 8 * query[:, :: heads // key_heads, 0]
    elif kind == "subnormal":
        value = value * torch.finfo(dtype).tiny / 4
    elif kind == "bool":
        mask = torch.rand(batch, 1, 1, length, device="cuda") < 0.5
        mask[..., -1] = True
    elif kind == "float":
        mask = randn(batch, heads, 1, length, dtype=dtype, seed=seed)
        mask[..., : length // 3] = float("-inf")
    elif kind == "filled":  # the free part of a static cache
        mask = (torch.arange(length, device="cuda") <= length // 3).view(1, 1, 1, -1)
    return query, key, value, mask


def expected(query, key, value, mask, scale=1.0):
    """In float64: [batch, 1, heads, size]."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf"))
            if mask.dtype == torch.bool
            else scores + mask.double()
        )
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ value).transpose(1, 2)


def by_pytorch(query, key, value, mask, scale=1.0):
    """As transformers calls it, with repeated keys."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale
    )
    return output.transpose(1, 2).contiguous()


def error(found, right):
    """Relative to the norm."""
    return float((found.double() - right).norm() / right.norm().clamp_min(1e-300))


@pytest.mark.whole_gpu
@pytest.mark.parametrize("kind", ["random", "large", "dominant", "bool", "float", "filled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_not_larger_than_pytorchs(shape, dtype, kind):
    """Against float64, over 20 seeds: median, and the largest."""
    for length in LENGTHS:
        ours, theirs = [], []
        for seed in range(SEEDS):
            each = inputs(shape, length, dtype, seed, kind)
            right = expected(*each)
            ours.append(error(attention(*each, 1.0), right))
            theirs.append(error(by_pytorch(*each), right))
        assert statistics.median(ours) <= CHANCE * statistics.median(theirs), length
        assert max(ours) <= 1.1 * max(theirs) + torch.finfo(dtype).eps, length


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_subnormal_values(dtype):
    each = inputs((8, 1, 256), 512, dtype, 0, "subnormal")
    right, found = expected(*each), attention(*each, 1.0)
    unit = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert (found.double() - right).abs().max() <= unit


@pytest.mark.whole_gpu
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_sequences_and_strides(dtype, length):
    """Slices of a longer cache, [batch, tokens, heads, size] in memory, padded on the left."""
    query, key, value, _ = inputs((8, 2, 256), length, dtype, 0, batch=3)
    mask = torch.arange(length, device="cuda") >= torch.tensor(
        [[0], [length // 2], [length - 1]], device="cuda"
    )
    mask = mask[:, None, None]
    right = expected(query, key, value, mask)
    strided = [
        torch.cat([each, each], 2).transpose(1, 2).contiguous().transpose(1, 2)[:, :, :length]
        for each in (key, value)
    ]
    assert not (length > 1 and strided[0].is_contiguous())
    contiguous = attention(query, key, value, mask, 1.0)
    assert torch.equal(attention(query, *strided, mask, 1.0), contiguous)
    assert error(contiguous, right) < 4 * torch.finfo(dtype).eps
    for row in range(3):  # as alone
        alone = attention(*(each[row : row + 1] for each in (query, key, value, mask)), 1.0)
        assert error(alone, right[row : row + 1]) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("length", [5, 700])
def test_rows_without_keys_and_values_that_are_not_finite(length):
    query, key, value, _ = inputs((8, 1, 256), length, torch.bfloat16, 0)
    nothing = torch.zeros(1, 1, 1, length, dtype=torch.bool, device="cuda")
    assert not attention(query, key, value, nothing, 1.0).any()
    assert not attention(query, key, value, nothing.to(torch.bfloat16) - float("inf"), 1.0).any()
    lowest = torch.full_like(nothing, torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    mean = value.double().mean(2, keepdim=True).transpose(1, 2)
    assert torch.allclose(
        attention(query, key, value, lowest, 1.0).double(), mean, atol=2e-3, rtol=1e-2
    )
    key[:, :, 2, 3] = float("nan")
    assert attention(query, key, value, None, 1.0).isnan().all()
    seen = torch.ones_like(nothing)
    seen[..., 2] = False
    assert attention(query, key, value, seen, 1.0).isfinite().all()
    value[:, :, 4] = float("inf")
    assert attention(query, key, value, seen, 1.0).isinf().all()


def test_same_bits_in_a_graph():
    each = inputs((8, 1, 512), 3000, torch.bfloat16, 0, "filled")
    eager = attention(*each, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(*each, 1.0)
    for _ in range(2):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)


def test_what_the_kernel_does_not_compute():
    query, key, value, mask = inputs((8, 2, 256), 100, torch.bfloat16, 0, "bool")
    for other in (
        (query.expand(-1, -1, 2, -1), key, value, mask),
        (query, key[..., :200], value[..., :200], mask),
        (query.float(), key, value, mask),
        (query, key[..., 1:], value, mask),
        (query, key, value, mask[..., :50]),
        (query, key, value, mask[0]),
        (query[:, :7], key, value, mask),
        (query, key[:, :, :0], value[:, :, :0], None),
    ):
        assert attention(*other, 1.0) is None


def test_memory_is_short_for_a_while(monkeypatch):
    each = inputs((8, 1, 64), 300, torch.float16, 0)
    launch.reset()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compiled", support.fails(KernelError("out of memory")))
        assert attention(*each, 1.0) is None
    assert attention(*each, 1.0) is not None
    assert not launch.without()
