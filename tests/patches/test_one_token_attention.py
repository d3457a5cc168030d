"""Decode steps compute attention in a kernel of this package."""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from contextlib import nullcontext, suppress

import pytest
import torch
import wrapt

import gemma4_compat
from gemma4_compat.patches.attention import _sdpa
from gemma4_compat.patches.attention import one_token_attention as patch
from gemma4_compat.runtime.kernels import one_token_attention
from tests.patches.test_captured_decoding import (
    PLE_ON_CPU,
    assert_same,
    captures,
    generated,
    load_model,
    prompt,
)
from tests.patches.test_cudnn_attention import make

SDPA = "aten::scaled_dot_product_attention"
#: All that replace the lookup of the attention function.
PATCHES = ("one_token_attention", "sliding_prompt_attention")


def calls_of_sdpa(model, tokens, **options):
    """How often PyTorch's attention runs in a forward over so many tokens."""
    from torch.profiler import ProfilerActivity, profile

    ids = torch.arange(5, 5 + tokens, device=model.device)[None]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        output = model(input_ids=ids, **options)
    return sum(event.name == SDPA for event in profiler.events()), output


def plain_on_the_cpu(tensor):
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def by_hand(query, key, value, mask, scale):
    """A kernel for the CPU."""
    scores = query @ key.transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def pretend(monkeypatch):
    """The kernel computes on the CPU."""
    monkeypatch.setattr(_sdpa, "plain", lambda: plain_on_the_cpu)
    monkeypatch.setattr(one_token_attention, "attention", by_hand)


def assert_no_sdpa(model):
    model = model.eval()
    with torch.no_grad():
        calls, output = calls_of_sdpa(model, 20, use_cache=True)
        assert calls == 2, "the layers of a prompt"
        calls_of_sdpa(model, 1, past_key_values=output.past_key_values)  # compares the kernels
        calls, _ = calls_of_sdpa(model, 1, past_key_values=output.past_key_values)
    assert not calls, f"{SDPA} computes one token: {calls} calls"


@pytest.mark.regression("one_token_attention", r"computes one token: 2 calls")
def test_a_decode_step(monkeypatch):
    pretend(monkeypatch)
    assert_no_sdpa(make())


@pytest.mark.cuda
@pytest.mark.regression("one_token_attention", r"computes one token: 2 calls")
def test_a_decode_step_on_a_gpu():
    assert_no_sdpa(make().to("cuda", torch.bfloat16))


# -- with the real kernel -------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("device_map", [{"": 0}, PLE_ON_CPU], ids=["whole", "PLE on the CPU"])
def test_captured_steps_equal_eager_ones(model_dir, device_map, batch):
    """Static cache, over windows and padding."""
    model = load_model(model_dir, "nf4", device_map)
    inputs = prompt(model, 20, batch=batch)
    inputs["attention_mask"][1:, :7] = 0
    assert_same(generated(model, inputs, tokens=60), generated(model, inputs, True, tokens=60))
    assert captures(model)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_logits_are_as_exact_as_pytorchs(kv_heads, static, dtype):
    """The error against float32, for a padded batch beyond the sliding window."""
    model = make(kv_heads=kv_heads).cuda().eval()
    ids = torch.randint(5, 96, (2, 90), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[1, :33] = 0
    half = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        exact = model(input_ids=ids, attention_mask=mask).logits[:, 40:]

    def error():
        from transformers import DynamicCache, StaticCache

        cache = (
            StaticCache(config=half.config, max_cache_len=128)
            if static
            else DynamicCache(config=half.config)
        )
        logits = []
        with torch.no_grad():
            half(input_ids=ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
            for at in range(40, 90):
                output = half(
                    input_ids=ids[:, at : at + 1],
                    attention_mask=mask[:, : at + 1],
                    past_key_values=cache,
                )
                logits.append(output.logits[:, -1])
        return float((torch.stack(logits, 1).float() - exact).square().mean().sqrt())

    found = error()
    with gemma4_compat.disabled("one_token_attention"):
        usual = error()
    assert found <= 1.1 * usual


@pytest.mark.cuda
def test_the_choices_agree_as_those_of_pytorchs_kernels_do():
    """With the same tokens fed: as often as those of two of PyTorch's kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = make().to("cuda", torch.bfloat16).eval()
    ids = torch.randint(5, 96, (1, 1000), generator=torch.Generator().manual_seed(1)).cuda()

    def choices():
        cache, chosen = None, []
        with torch.no_grad():
            for at in range(1000):
                output = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                chosen.append(output.logits[0, -1].argmax())
        return torch.stack(chosen)

    ours = choices()
    with gemma4_compat.disabled("one_token_attention"):
        usual = choices()
        with sdpa_kernel(SDPBackend.MATH):
            other = choices()
    agree, expected = (float((each == usual).float().mean()) for each in (ours, other))
    deviation = (max(expected * (1 - expected), 1e-3) / 1000) ** 0.5
    assert agree >= expected - 2 * deviation


# -- without a GPU --------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """On the CPU: the shapes of the queries that the kernel would get.  PyTorch computes them."""
    shapes = []

    def attention(query, key, value, mask, scale):
        shapes.append(tuple(query.shape))
        assert scale == 1.0
        assert key.shape[:2] == (query.shape[0], 1)

    monkeypatch.setattr(_sdpa, "plain", lambda: plain_on_the_cpu)
    monkeypatch.setattr(one_token_attention, "attention", attention)
    return shapes


def steps(model, count=3):
    ids, cache, logits = torch.arange(5, 25)[None], None, []
    with torch.no_grad():
        for _ in range(count):
            output = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            logits.append(output.logits[:, -1])
    return torch.stack(logits)


def test_only_forwards_of_one_token_without_gradients(seen):
    model = make().eval()
    found = steps(model)
    assert seen == 2 * [(1, 4, 1, 256), (1, 4, 1, 512)]
    seen.clear()
    model(input_ids=torch.tensor([[5]]))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        steps(model)
    assert not seen
    model.set_attn_implementation("sdpa")
    with gemma4_compat.disabled("one_token_attention"):
        assert torch.equal(found, steps(model))
    assert not seen


@torch.no_grad()
def test_several_tokens_are_sequences_with_the_same_keys(seen):
    """With a mask for each of them, but not without one, and not of several sequences."""
    model, ids = make().eval(), torch.arange(5, 25)[None]
    for tokens, is_ours in ((8, True), (9, False)):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        mask = torch.ones(1, 20 + tokens, dtype=torch.long)
        mask[:, 3] = 0  # transformers makes no mask where none is needed
        model(input_ids=ids[:, :tokens], past_key_values=cache, attention_mask=mask)
        found, seen[:] = list(seen), []
        assert found == ([(8, 4, 1, 256), (8, 4, 1, 512)] if is_ours else [])
    model(input_ids=ids[:, :5])
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    masks = {"full_attention": mask, "sliding_attention": mask}
    model(input_ids=ids[:, :5], attention_mask=masks)
    model(input_ids=ids[:, :5].repeat(2, 1), attention_mask=torch.ones(2, 5).tril())
    assert not seen


def test_a_proxy_of_the_user(seen, monkeypatch):
    """Runs, although its class is said to be that of PyTorch's function."""
    functional, calls = torch.nn.functional, []

    def own(usual, _, args, kwargs):
        calls.append(args[0].shape[2])
        return usual(*args, **kwargs)

    proxy = wrapt.FunctionWrapper(functional.scaled_dot_product_attention, own)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", proxy)
    steps(make().eval())
    assert not seen
    assert len(calls) > 2


def test_the_result_is_used(seen, monkeypatch):
    def zeros(query, key, value, mask, scale):
        return torch.zeros(query.shape[0], 1, *query.shape[1::2])

    model = make().eval()
    expected = steps(model)
    monkeypatch.setattr(one_token_attention, "attention", zeros)
    assert not torch.equal(steps(model)[1:], expected[1:])


@pytest.mark.parametrize("table", ["_local_mapping", "_global_mapping"])
@pytest.mark.parametrize("first", [True, False], ids=["before our import", "after it"])
def test_a_function_of_the_user(seen, monkeypatch, first, table):
    """Another function under the name ``sdpa``, for one table or registered for all."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = []

    def mine(*args, **kwargs):
        calls.append(args)
        return sdpa_attention_forward(*args, **kwargs)

    model = make().eval()
    with gemma4_compat.disabled(*PATCHES) if first else nullcontext():
        monkeypatch.setitem(getattr(ALL_ATTENTION_FUNCTIONS, table), "sdpa", mine)
    expected = steps(model)
    assert len(calls) == 6
    monkeypatch.undo()
    assert not seen
    assert torch.equal(expected, steps(model))


def test_an_eager_function_of_the_user(seen, monkeypatch):
    """Ours must not be called in its place, nor it in place of ours: sdpa runs as without us."""
    model = make().eval()
    expected = steps(model)
    names, mine = vars(sys.modules[type(model).__module__]), lambda *_, **__: pytest.fail("eager")
    monkeypatch.setitem(names, "eager_attention_forward", mine)
    seen.clear()
    assert torch.equal(steps(model), expected)
    assert not seen


def test_options_that_the_kernel_does_not_know(seen):
    query, key = torch.ones(1, 4, 1, 32), torch.ones(1, 1, 3, 32)
    calls = []

    def sdpa(*args, **options):
        calls.append(options)
        return query, None

    for options in ({"dropout": 0.1}, {"position_bias": query}, {"cache": key}, {"softcap": 1.0}):
        patch._attention(sdpa, None, query, key, key, None, scaling=1.0, **options)
        assert calls.pop() == {"scaling": 1.0, **options}
    assert not seen
    patch._attention(sdpa, None, query, key, key, None, scaling=1.0, dropout=0.0)
    assert seen


def llama(layers=1):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=1,
        )
    ).eval()  # fmt: skip


def test_another_model_in_the_meantime(seen):
    """During a forward of ours, other models and other threads use the usual function."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    other = llama()
    expected = steps(other)
    assert not seen
    model, found = make().eval(), []

    def in_a_thread(*_):
        thread = threading.Thread(target=lambda: found.append(ALL_ATTENTION_FUNCTIONS["sdpa"]))
        thread.start()
        thread.join()
        found.append(steps(other))
        assert layer.config._attn_implementation == "sdpa"

    layer = model.model.layers[0].self_attn
    layer.q_proj.register_forward_hook(in_a_thread)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
    assert found[0] is sdpa_attention_forward
    assert torch.equal(found[1], expected)
    assert len(seen) == 2, "the layers of Gemma 4"


def calls_a_layer():
    """How many Python functions a layer of another model calls."""
    counts = []
    for layers in (2, 4):
        model, events = llama(layers), []
        with torch.no_grad():
            for note in (None, lambda frame, event, _, events=events: events.append(event)):
                sys.setprofile(note)
                try:
                    model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
                finally:
                    sys.setprofile(None)
        counts.append(events.count("call"))
    return (counts[1] - counts[0]) / 2


def test_other_models_pay_little():
    for kind in ("gemma4", "gemma3n"):
        make(kind)
    with suppress(pytest.skip.Exception):
        make("unified")
    found = calls_a_layer()
    with gemma4_compat.disabled():
        assert found <= calls_a_layer() + 2


def test_a_compiled_forward_of_another_model():
    layer, states = llama().model.layers[0].self_attn, torch.randn(1, 3, 16)
    compiled = torch.compile(layer.forward, backend="eager", fullgraph=True)
    angles = (torch.ones(1, 3, 8), torch.zeros(1, 3, 8))
    options = {"position_embeddings": angles, "attention_mask": None}
    with torch.no_grad():
        expected = layer(states, **options)[0]
        assert torch.equal(compiled(states, **options)[0], expected)


def test_a_subclass_of_the_layer(seen):
    model = make().eval()
    layer = model.model.layers[0].self_attn

    class Mine(type(layer)):
        def forward(self, hidden_states, *args, **kwargs):
            self.tokens = hidden_states.shape[1]
            return super().forward(hidden_states, *args, **kwargs)

    expected = steps(model)
    usual = list(seen)
    seen.clear()
    layer.__class__ = Mine
    assert torch.equal(steps(model), expected)
    assert seen == usual
    assert layer.tokens == 1


def test_after_a_forward_that_raised(seen):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = make().eval()

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(input_ids=torch.tensor([[5]]))
    handle.remove()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_compiled(seen):
    layer = make().eval().model.layers[0]
    states = torch.randn(1, 1, 64)
    positions = (torch.ones(1, 1, 256), torch.zeros(1, 1, 256))
    attention = layer.self_attn
    compiled = torch.compile(attention.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        options = {"position_embeddings": positions, "attention_mask": None}
        if "shared_kv_states" in inspect.signature(type(attention).forward).parameters:
            options["shared_kv_states"] = {}
        expected = attention(states, **options)[0]
        assert len(seen) == 1
        assert torch.equal(compiled(states, **options)[0], expected)
    assert len(seen) == 1


@pytest.mark.regression("one_token_attention", r"computes one token: 2 calls")
def test_a_decode_step_of_gemma3n(monkeypatch):
    pretend(monkeypatch)
    assert_no_sdpa(make(kind="gemma3n"))


@pytest.mark.cuda
@pytest.mark.regression("one_token_attention", r"computes one token: 2 calls")
def test_a_decode_step_on_a_gpu_of_gemma3n():
    assert_no_sdpa(make(kind="gemma3n").to("cuda", torch.bfloat16))


@pytest.mark.regression("one_token_attention", r"computes one token: 2 calls")
def test_a_decode_step_of_unified(monkeypatch):
    pretend(monkeypatch)
    assert_no_sdpa(make(kind="unified"))


@pytest.mark.cuda
@pytest.mark.regression("one_token_attention", r"computes one token: 2 calls")
def test_a_decode_step_on_a_gpu_of_unified():
    assert_no_sdpa(make(kind="unified").to("cuda", torch.bfloat16))
