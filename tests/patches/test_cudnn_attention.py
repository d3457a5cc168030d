"""Gradients of attention are finite on a GPU, also where all scores of a query are low."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

import gemma4_compat
from gemma4_compat.patches.attention import cudnn_attention as patch
from gemma4_compat.runtime.capture.conditions import environment_now
from tests.support import load_model

#: the lengths at which cuDNN is wrong, and others
WRONG, RIGHT = (64, 192, 704), (128, 640, 577)
TEXT = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "layer_types": ["sliding_attention", "full_attention"], "head_dim": 256, "sliding_window": 16,
    "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96,
}  # fmt: skip


def make(kind="gemma4", kv_heads=1, window=16):
    import transformers

    own = {
        "gemma4": ("Gemma4", {"intermediate_size": 64, "hidden_size_per_layer_input": 0}),
        "unified": ("Gemma4Unified", {"intermediate_size": 64}),
        "gemma3n": ("Gemma3n", {"intermediate_size": [64, 64], "hidden_size_per_layer_input": 8}),
    }
    prefix, options = own[kind]
    if not hasattr(transformers, f"{prefix}ForCausalLM"):
        pytest.skip(f"this transformers has no {prefix}")
    if kind == "gemma3n":
        options |= {"laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]}
    else:
        options["global_head_dim"] = 512
    config = getattr(transformers, f"{prefix}TextConfig")
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForCausalLM")(
        config(**{**TEXT, "sliding_window": window}, **options, num_key_value_heads=kv_heads)
    )


def low_scores(**options):
    """Queries and keys point in opposite directions, in a pair that positions hardly turn."""
    model = make(**options)
    sliding = model.model.layers[0].self_attn
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1
        for projection, sign in ((sliding.q_proj, 1), (sliding.k_proj, -1)):
            projection.weight.zero_()
            projection.weight[127::256, 0] = sign
    return model


def gradients(model, length, rows=2, **options):
    """Those of all parameters, after one step."""
    torch.manual_seed(1)
    ids = torch.randint(5, 96, (rows, length)).to(model.device)
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False, **options).loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.cuda
@pytest.mark.regression("cudnn_attention", r"grad_norm is nan")
def test_a_training_step():
    assert_finite_norm(low_scores())


def assert_finite_norm(model):
    gradients(model.to("cuda", torch.bfloat16), 192)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.isfinite(), f"grad_norm is {norm}"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("length", WRONG)
def test_gradients(length, kv_heads, dtype):
    """They are those of another kernel.  It adds in any order, so the last bits differ."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = low_scores(kv_heads=kv_heads).to("cuda")
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=dtype == "autocast")
    if dtype != "autocast":
        model.to(dtype)
    with autocast:
        found = gradients(model, length)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            expected = gradients(model, length)
    assert all(each.isfinite().all() for each in found)
    total = torch.nn.utils.get_total_norm(expected)
    off = torch.nn.utils.get_total_norm([a - b for a, b in zip(found, expected, strict=True)])
    assert off <= 0.02 * total, f"off by {off / total}"


@pytest.mark.cuda
@pytest.mark.parametrize("length", RIGHT)
def test_other_lengths(length, monkeypatch):
    """PyTorch chooses, as without the patch."""
    monkeypatch.setattr(patch, "_without_cudnn", lambda: pytest.fail("it is right"))
    model = low_scores().to("cuda", torch.bfloat16)
    assert all(each.isfinite().all() for each in gradients(model, length))


@pytest.mark.cuda
def test_a_forward_without_gradients_keeps_its_bits():
    model, ids = low_scores().to("cuda", torch.bfloat16), torch.arange(5, 69, device="cuda")[None]
    with torch.no_grad():
        found = model(input_ids=ids).logits
        with gemma4_compat.disabled("cudnn_attention"):
            assert torch.equal(found, model(input_ids=ids).logits)
    model.requires_grad_(False)
    found = model(input_ids=ids).logits
    with gemma4_compat.disabled("cudnn_attention"):
        assert torch.equal(found, model(input_ids=ids).logits)


@pytest.mark.cuda
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_example_does_not_meet_checkpointing(reentrant):
    """The first forward runs the example, its recomputation does not."""
    patch._wrong.clear()
    model = low_scores().to("cuda", torch.bfloat16).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model, 192)
    assert all(each.isfinite().all() for each in found)


@pytest.mark.cuda
def test_a_compiled_step():
    model = low_scores().to("cuda", torch.bfloat16)
    layer = model.model.layers[0].self_attn
    layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    assert all(each.isfinite().all() for each in gradients(model, 192))
    assert cudnn_sdp_enabled()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["multimodal", "gemma4", "gemma3n", "unified"])
def test_a_compiled_token(kind, model_dir):
    """torch.compile traces a decode step as one graph, if it does so without the patches."""
    from transformers import CompileConfig

    whole = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    ids = torch.arange(3, 12, device="cuda")[None]

    def tokens(**options):
        model = load_model(model_dir) if kind == "multimodal" else make(kind).eval()
        model.to("cuda", torch.bfloat16)
        return model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False,
            eos_token_id=None, cache_implementation="static", **options,
        )  # fmt: skip

    torch.compiler.reset()
    try:
        with gemma4_compat.disabled():
            tokens(compile_config=whole)
    except Exception as error:
        pytest.skip(f"not without the patches, either: {type(error).__name__}")
    torch.compiler.reset()
    assert torch.equal(tokens(compile_config=whole), tokens(disable_compile=True))


@pytest.mark.parametrize("before", [True, False])
def test_the_choice_of_kernels_is_restored(before):
    """Of two threads, the first to enter is the first to leave."""
    was, inside, leave = cudnn_sdp_enabled(), threading.Event(), threading.Event()
    enable_cudnn_sdp(before)

    def other():
        with patch._without_cudnn():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    try:
        thread.start()
        inside.wait()
        with suppress(KeyboardInterrupt), patch._without_cudnn():
            leave.set()
            thread.join()
            assert not cudnn_sdp_enabled()
            raise KeyboardInterrupt
        assert cudnn_sdp_enabled() == before
    finally:
        enable_cudnn_sdp(was)


def test_captured_steps_of_another_thread_stay():
    """A forward without cuDNN is no change of the user's settings; the user's own change is."""
    was, before = cudnn_sdp_enabled(), environment_now()
    found, meanwhile = [], threading.Event()

    def other():
        with patch._without_cudnn():
            found.append(cudnn_sdp_enabled())
            meanwhile.set()
            leave.wait()

    leave, thread = threading.Event(), threading.Thread(target=other)
    thread.start()
    meanwhile.wait()
    try:
        found.append(environment_now() == before)
    finally:
        leave.set()
        thread.join()
    assert found == [False, True]
    try:
        enable_cudnn_sdp(not was)
        assert environment_now() != before
    finally:
        enable_cudnn_sdp(was)


@pytest.mark.parametrize("kind", ["gemma4", "gemma3n", "unified"])
def test_on_the_cpu_pytorch_chooses(kind, monkeypatch):
    monkeypatch.setattr(patch, "_without_cudnn", lambda: pytest.fail("not a GPU"))
    assert gradients(make(kind), 64)


def test_a_compiled_forward_on_the_cpu(recwarn):
    """torch.compile warns of functions with a cache, once in a process."""
    torch._dynamo.utils.warn_once_cache.clear()
    model = low_scores()
    expected = gradients(model, 64)
    layer = model.model.layers[0].self_attn
    layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    assert all(map(torch.equal, expected, gradients(model, 64)))
    assert not [each for each in recwarn if "lru_cache" in str(each.message)]


class OnAGPU:
    """Says that it is on a GPU, and has a shape."""

    is_cuda, device, dtype = True, "cuda:0", torch.bfloat16

    def __init__(self, length, *, requires_grad):
        self.shape, self.requires_grad = (1, length, 8), requires_grad


def test_the_rules(monkeypatch):
    """On which calls PyTorch's choice is changed, if cuDNN is wrong, and if it is right."""
    monkeypatch.setattr(patch, "_decodes_wrong", lambda device: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    layer = make().model.layers[0].self_attn.requires_grad_(False)

    def changed(length, *, masked=True, gradient=True):
        mask = torch.ones(1, 1, length, length) if masked else None
        return patch._is_wrong(layer, OnAGPU(length, requires_grad=gradient), mask)

    for wrong in (True, False):
        patch._wrong.clear()
        monkeypatch.setattr(patch, "_has_wrong_gradients", lambda *example, wrong=wrong: wrong)
        assert [changed(length) for length in (*WRONG, *RIGHT)] == [wrong] * 3 + [False] * 3
        assert not changed(64, masked=False)
        assert not changed(64, gradient=False)
        assert not changed(1)
        with torch.no_grad():
            assert not changed(64)
    patch._wrong.clear()
    monkeypatch.setattr(patch, "_has_wrong_gradients", lambda *example: True)
    assert not changed(64, gradient=False)
    layer.q_proj.weight.requires_grad_()
    assert changed(64, gradient=False)
    monkeypatch.setattr(patch, "_decodes_wrong", lambda device: True)
    assert changed(1, masked=False, gradient=False)


def test_the_example_does_not_run_in_a_backward(monkeypatch):
    """It would wait for the backward, and the backward for it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(patch, "_has_wrong_gradients", lambda *example: pytest.fail("it ran"))
    patch._wrong.clear()
    layer, answers = make().model.layers[0].self_attn, []

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            answers.append(patch._may_be_wrong(layer, OnAGPU(64, requires_grad=True)))
            return gradient

    Backward.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert answers == [True]
    assert not patch._wrong


def test_the_example():
    """No kernel for the CPU is wrong."""
    assert not patch._has_wrong_gradients(torch.device("cpu"), torch.bfloat16, 64)


@pytest.mark.cuda
@pytest.mark.regression("cudnn_attention", r"grad_norm is nan")
def test_a_training_step_of_gemma3n():
    assert_finite_norm(low_scores(kind="gemma3n"))


@pytest.mark.cuda
@pytest.mark.regression("cudnn_attention", r"grad_norm is nan")
def test_a_training_step_of_unified():
    assert_finite_norm(low_scores(kind="unified"))
