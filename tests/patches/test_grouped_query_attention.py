"""Full layers read the keys of the cache, and not a copy for each query head."""

from __future__ import annotations

import inspect

import pytest
import torch

import gemma4_compat
from gemma4_compat.patches.attention import _sdpa, one_token_attention
from gemma4_compat.patches.attention import grouped_query_attention as patch
from gemma4_compat.runtime.kernels import launch
from gemma4_compat.runtime.kernels.compiler import KernelError
from tests import support
from tests.patches.test_cudnn_attention import make
from tests.patches.test_one_token_attention import plain_on_the_cpu

HEADS, KV_HEADS, SIZE = 4, 2, 512


def model_on(device="cpu", dtype=torch.float32, kind="gemma4"):
    """Its last layer has four query heads of 512, and two KV heads."""
    return make(kind, kv_heads=KV_HEADS).to(device, dtype).eval()


def ids_of(length, batch=1, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 96, (batch, length), generator=generator).to(device)


def cache_of(model, length):
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def copies(model, **inputs):
    """The shapes of all copies of 4-D tensors in a forward with heads of 512, and its output."""
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        output = model(**inputs)
    shapes = [each.input_shapes[0] for each in found.events() if each.name == "aten::copy_"]
    return [shape for shape in shapes if len(shape) > 3 and shape[-1] == SIZE], output


def assert_no_copies(model, length=64):
    """In the last of four chunks; the first one has no mask, and the second one also compares."""
    ids, cache = ids_of(length, device=model.device), None
    for part in ids.split(length // 4, 1):
        shapes, output = copies(model, input_ids=part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
    keys = heads_in(shapes, length)
    assert keys < HEADS, f"keys or values of {keys} heads are copied"


def heads_in(shapes, length):
    """Of how many heads the largest of these tensors has this number of keys."""
    return max((torch.Size(each).numel() for each in shapes), default=0) // (length * SIZE)


def assert_no_copies_of_a_static_cache(model):
    """Whose first chunk may have no mask."""
    for _ in range(2):  # the first time also compares
        cache, found = cache_of(model, 64), []
        for part in ids_of(40, device=model.device).split(20, 1):
            shapes, _ = copies(model, input_ids=part, past_key_values=cache)
            found.append(heads_in(shapes, 64))
    assert max(found) < HEADS


@pytest.fixture
def pretended(monkeypatch):
    """The CPU counts as a GPU on which the kernel gives the same bits."""
    monkeypatch.setattr(_sdpa, "plain", lambda: plain_on_the_cpu)
    monkeypatch.setattr(patch, "_has_same_bits", lambda *_: True)


@pytest.mark.regression("grouped_query_attention", r"of 4 heads are copied")
def test_a_prompt(pretended):
    assert_no_copies(model_on())


@pytest.mark.cuda
@pytest.mark.regression("grouped_query_attention", r"of 4 heads are copied")
def test_a_prompt_on_a_gpu():
    assert_no_copies(model_on("cuda", torch.bfloat16))


@pytest.mark.cuda
def test_chunks_of_a_prompt_on_a_gpu():
    assert_no_copies_of_a_static_cache(model_on("cuda", torch.bfloat16))


def test_chunks_of_a_prompt(pretended):
    assert_no_copies_of_a_static_cache(model_on())


def test_a_plan_has_no_copies(monkeypatch):
    """Beside the mask, no tensor of a plan grows with the context as keys and values do."""
    from gemma4_compat.planning.peak import forward_peak

    def largest(fused=True):
        return forward_peak(model_on("meta", torch.bfloat16), 64, 4096 - 64, fused=fused)[1]

    with gemma4_compat.disabled("grouped_query_attention"):
        assert largest() == HEADS * 4097 * SIZE * 2
    assert largest() < HEADS * 4097 * SIZE
    assert largest(fused=False) >= HEADS * 4097 * SIZE * 2, "such a GPU has no kernel for it"
    functional, usual = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention
    own = lambda *args, **kwargs: usual(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(functional, "scaled_dot_product_attention", own)
    assert largest() == HEADS * 4097 * SIZE * 2, "the function of a user gets copies"


# -- with PyTorch's kernel ------------------------------------------------------------------------


def logits(model, lengths, static=True):
    """Those of a prompt in parts of these lengths; a static cache has room for one token more."""
    total, found = sum(lengths), []
    ids, cache = ids_of(total, device=model.device), cache_of(model, total + 1) if static else None
    with torch.no_grad():
        for part in ids.split(list(lengths), 1):
            output = model(input_ids=part, past_key_values=cache, use_cache=True)
            found.append(output.logits)
            cache = output.past_key_values
    return torch.cat(found, 1)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["gemma4", "unified"])
@pytest.mark.parametrize("lengths", [(90, 37), (90, 38), (64, 1, 1, 9), (300, 211, 2)], ids=str)
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_the_same_bits(static, lengths, kind, dtype):
    launch.reset(compiled=False)
    model = model_on("cuda", dtype, kind)
    found = logits(model, lengths, static)
    assert not launch.without()
    with gemma4_compat.disabled("grouped_query_attention"):
        assert torch.equal(found, logits(model, lengths, static))


@pytest.mark.cuda
def test_the_memory_of_copies():
    """Keys and values of all heads are two tensors of 32 MiB."""

    def peak():
        model, ids = model_on("cuda", torch.bfloat16), ids_of(64, device="cuda")
        cache = cache_of(model, 8192)
        with torch.no_grad():
            for _ in range(2):  # with and without a mask, the bits are compared once
                model(input_ids=ids, past_key_values=cache)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(input_ids=ids, past_key_values=cache)
        return torch.cuda.max_memory_allocated() - before

    found = peak()
    with gemma4_compat.disabled("grouped_query_attention"):
        assert found <= peak() - 60 * 2**20


@pytest.mark.cuda
def test_a_gpu_with_other_bits(monkeypatch):
    """Then transformers copies, as without the patch."""
    launch.reset(compiled=False)
    monkeypatch.setattr(patch, "require_equal", support.fails(KernelError("they differ")))
    with pytest.raises(AssertionError, match="of 4 heads are copied"):
        assert_no_copies(model_on("cuda", torch.bfloat16))
    [line] = launch.without()
    assert "they differ" in line
    launch.reset(compiled=False)


@pytest.mark.cuda
def test_another_kernel_of_pytorch():
    """Whoever chooses it gets what it computes without the patch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = model_on("cuda", torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):
        found = logits(model, (40, 24))
        with gemma4_compat.disabled("grouped_query_attention"):
            assert torch.equal(found, logits(model, (40, 24)))


# -- without a GPU --------------------------------------------------------------------------------


def both(model, **inputs):
    """The logits with and without the patch."""
    with torch.no_grad():
        found = model(**inputs).logits
        with gemma4_compat.disabled("grouped_query_attention"):
            return found, model(**inputs).logits


@pytest.mark.parametrize("kind", ["gemma4", "unified"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_grouped(pretended, static, kind):
    model, lengths = model_on(kind=kind), (40, 1, 30, 7)
    found = logits(model, lengths, static)
    with gemma4_compat.disabled("grouped_query_attention"):
        torch.testing.assert_close(found, logits(model, lengths, static))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [1, HEADS])
def test_a_mask_of_the_user(pretended, heads, dtype):
    """Each query sees some keys anywhere, with a mask for all heads or for each."""
    seen = torch.rand(1, heads, 20, 20, generator=torch.Generator().manual_seed(1)) < 0.3
    seen[..., 0] = True
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -1e9)
    masks = {"full_attention": mask, "sliding_attention": mask}
    torch.testing.assert_close(*both(model_on(), input_ids=ids_of(20), attention_mask=masks))


def doubled(original):
    """What a user puts in the place of a function."""
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


class Proxy:
    """What a user puts in the place of a function; it has any attribute."""

    def __init__(self, function):
        self._function = function

    def __getattr__(self, name):
        return Proxy(self._function)

    def __call__(self, *args, **kwargs):
        return 2 * self._function(*args, **kwargs)


PLACES = ["PyTorch", "repeat_kv", "a proxy", "code", "transformers and its table"]


@pytest.mark.parametrize("place", PLACES)
def test_functions_of_the_user(pretended, monkeypatch, place):
    """Run as without the patch, also after forwards that were grouped."""
    from transformers.integrations import sdpa_attention as module
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    model, functional = model_on(), torch.nn.functional
    logits(model, (20, 20))
    if place == "PyTorch":
        usual = functional.scaled_dot_product_attention
        monkeypatch.setattr(functional, "scaled_dot_product_attention", doubled(usual))
    elif place == "a proxy":
        monkeypatch.setattr(module, "repeat_kv", Proxy(module.repeat_kv))
    elif place == "code":
        own = lambda hidden_states, n_rep: 2 * hidden_states.repeat_interleave(n_rep, 1)  # noqa: E731
        monkeypatch.setattr(inspect.unwrap(module.repeat_kv), "__code__", own.__code__)
    elif place == "repeat_kv":
        monkeypatch.setattr(module, "repeat_kv", doubled(module.repeat_kv))
    else:
        usual, seen = module.sdpa_attention_forward, []

        def own(layer, query, *args, **kwargs):
            seen.append(len(query))
            return usual(layer, query, *args, **kwargs)

        monkeypatch.setattr(module, "sdpa_attention_forward", own)
        monkeypatch.setitem(type(TABLE)._global_mapping, "sdpa", own)
    found = logits(model, (20, 20))
    with gemma4_compat.disabled("grouped_query_attention"):
        assert torch.equal(found, logits(model, (20, 20)))
    if place == PLACES[-1]:
        assert {*seen} == {1}


def test_padding(pretended):
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[:, :5] = 0
    found, usual = both(model_on(), input_ids=ids_of(20), attention_mask=mask)
    torch.testing.assert_close(found[:, 5:], usual[:, 5:])


def test_a_batch_is_as_without_the_patch(pretended):
    ids, mask = ids_of(20, 3), torch.ones(3, 20, dtype=torch.long)
    mask[1, :5] = 0
    assert torch.equal(*both(model_on(), input_ids=ids, attention_mask=mask))


@pytest.mark.parametrize("order", [1, -1])
def test_beside_a_kernel_for_one_token(pretended, monkeypatch, order):
    """Both are asked, whichever is installed first."""
    from gemma4_compat.runtime.kernels import one_token_attention as kernel

    asked = []
    monkeypatch.setattr(kernel, "attention", lambda *inputs: asked.append(inputs[1].shape))
    names = [one_token_attention.PATCH.name, patch.PATCH.name][::order]
    model = model_on()
    with gemma4_compat.disabled(*names):
        usual = logits(model, (40, 1, 2))
    gemma4_compat.uninstall(*names)
    for name in names:
        gemma4_compat.install(name)
    torch.testing.assert_close(logits(model, (40, 1, 2)), usual)
    assert asked, "the kernel of fewer tokens was not asked"


def test_many_keys_are_compared_again(monkeypatch):
    """Once with few keys, and once with more than 4,096, before so many are used."""
    compared = []
    usual = torch.zeros(1)

    def sdpa(layer, query, key, value, mask, **options):
        compared.append(key.shape[2])
        return usual, None

    monkeypatch.setattr(patch, "_grouped", lambda *args, **options: usual)
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", lambda _: True)
    launch.reset()
    for keys in (100, 4095, 4096, 9000, 100):
        query, key = torch.zeros(1, 4, 2, 512), torch.zeros(1, 2, keys, 512)
        assert patch._has_same_bits(sdpa, None, query, key, None, None)
    assert compared == [65, 4097]
    launch.reset()
