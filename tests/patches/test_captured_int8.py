"""Captured decode steps of 8-bit layers with an outlier threshold."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import gemma4_compat
from gemma4_compat.runtime.capture import conditions
from gemma4_compat.runtime.kernels import int8_outliers
from gemma4_compat.runtime.kernels.step import in_step, running
from tests import support
from tests.patches.test_captured_decoding import (
    assert_same,
    captures,
    generated,
    load_model,
    obstacle,
    prompt,
)


@pytest.mark.cuda
@pytest.mark.parametrize("outliers", [0, 1, 5], ids=["no outlier", "one outlier", "five outliers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_outliers_of_8_bit_layers(dtype, outliers):
    """The search on the GPU finds the same outliers; several are added in another order."""
    from bitsandbytes import matmul as original  # outside of steps
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(outliers)
    for size, outputs, bias in ((64, 32, False), (2816, 704, True), (12288, 2048, False)):
        layer = Linear8bitLt(size, outputs, bias=bias, has_fp16_weights=False, threshold=6.0)
        layer = layer.to(dtype).cuda().eval()
        row = torch.randn(1, 1, size, device="cuda", dtype=dtype).clamp(-5, 5)
        columns = torch.randperm(size)[:outliers].cuda()
        row[..., columns] = 6 + 20 * torch.rand(outliers, device="cuda", dtype=dtype)
        row[..., columns[1::2]] *= -1
        with torch.no_grad():
            expected = layer(row)
            found = int8_outliers.product(original, row, layer.state, layer.bias)
            if outliers < 2:
                assert torch.equal(found, expected)
            # The last bit of the dtype, where the sum is near zero that of its terms.
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(found, expected, rtol=eps, atol=30 * eps)
            layer.state.threshold = 0.0
            assert outliers == 0 or not torch.equal(layer(row), found), "outliers matter"


BUG = pytest.mark.regression("captured_int8", r"assert 0 == 1")
BEHIND = pytest.mark.regression("captured_int8", r"assert 0 == 1", behind="hf_initialized_flag")
PLACES = [
    pytest.param(False, marks=BUG, id="on the GPU"),
    pytest.param(True, marks=BEHIND, id="streamed"),
]


@pytest.mark.cuda
@pytest.mark.parametrize("streamed", PLACES)
def test_8_bit_with_a_threshold(model_dir, streamed):
    """Captured steps search on the GPU, and equal eager steps that do so bit for bit."""
    whole = load_model(model_dir, "int8", {"": 0}, llm_int8_threshold=1.5)
    own = generated(whole, prompt(whole), eager=True)
    with in_step():
        expected = generated(whole, prompt(whole), eager=True)
    model = support.with_layers_on_the_cpu(whole, range(6)) if streamed else whole
    assert_same(generated(model, prompt(model)), expected)
    assert_same(generated(model, prompt(model)), expected)
    assert captures(model) == 1
    assert_same(generated(model, prompt(model), eager=True), own)


@pytest.mark.cuda
def test_accuracy_of_8_bit_with_a_threshold(model_dir):
    """Captured steps are as far from a float32 model as those of bitsandbytes."""
    model = load_model(model_dir, "int8", {"": 0}, llm_int8_threshold=1.5)
    exact = load_model(model_dir, None, {"": 0}).float()
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear8bitLt":
            weight = module.weight.CB.float() * module.weight.SCB[:, None] / 127
            exact.get_submodule(name).weight.data = weight
    errors = {"eager": [], "captured": []}
    for seed in range(8):
        inputs = prompt(model, seed=seed)
        for way, each in errors.items():
            tokens, logits = generated(model, inputs, eager=way == "eager")
            with torch.no_grad():
                all_logits = exact(input_ids=tokens.cuda()).logits.cpu()
            each.append(logits[1:, 0] - all_logits[0, 12:-1])
    eager, captured = (torch.stack(each).square().mean().sqrt() for each in errors.values())
    assert captured < 1.1 * eager


@pytest.mark.cuda
def test_several_sequences_in_8_bit_with_a_threshold(model_dir, caplog):
    model = load_model(model_dir, "int8", {"": 0})
    expected = generated(model, prompt(model, batch=2), eager=True)
    assert_same(generated(model, prompt(model, batch=2)), expected)
    assert captures(model) == 0
    assert "several sequences" in caplog.text


# -- without a GPU --------------------------------------------------------------------------------


def test_outlier_search_of_8_bit_layers(model_dir, monkeypatch):
    """Without a GPU that compiles kernels, nothing searches but the CPU."""
    monkeypatch.setattr(conditions, "CAPTURED_ON", ("cpu",))
    assert "llm_int8_threshold=0" in obstacle(load_model(model_dir, "int8"))
    assert obstacle(load_model(model_dir, "int8", llm_int8_threshold=0.0)) is None


@pytest.fixture
def searches(monkeypatch):
    """The threads whose layers search on the GPU; here such a search returns zeros."""
    threads = []

    def product(original, inputs, state, bias):
        threads.append(threading.get_ident())
        return inputs.new_zeros(*inputs.shape[:-1], len(state.SCB))

    monkeypatch.setattr(int8_outliers, "product", product)
    monkeypatch.setattr(int8_outliers, "_obstacle", lambda inputs, state: None)
    return threads


@pytest.fixture
def layer(model_dir):
    return load_model(model_dir, "int8").model.language_model.layers[0].mlp.up_proj


def row_of(layer):
    return torch.randn(1, 1, layer.in_features, dtype=torch.bfloat16)


@torch.no_grad()
def test_only_the_thread_of_a_step_searches_on_the_gpu(layer, searches):
    row = row_of(layer)
    expected = layer(row)
    found = []
    with in_step() as step:
        assert not layer(row).any()
        thread = threading.Thread(target=lambda: found.append(layer(row)))
        thread.start()
        thread.join()
        assert step.searched
    assert torch.equal(found[0], expected)
    assert torch.equal(layer(row), expected)
    assert searches == [threading.get_ident()]
    assert running() is None


@torch.no_grad()
def test_other_code_may_replace_matmul_during_a_step(layer, searches, monkeypatch):
    """A step writes to no library."""
    import bitsandbytes

    row, before = row_of(layer), bitsandbytes.matmul
    with in_step():
        assert bitsandbytes.matmul is before
        with monkeypatch.context() as patch:
            patch.setattr(bitsandbytes, "matmul", lambda *args, **kwargs: before(*args, **kwargs))
            own = bitsandbytes.matmul
            assert not layer(row).any()
            assert bitsandbytes.matmul is own
    assert bitsandbytes.matmul is before
    layer(row)


@torch.no_grad()
def test_a_search_that_raises(layer, searches, monkeypatch):
    row = row_of(layer)
    expected = layer(row)
    monkeypatch.setattr(int8_outliers, "product", support.fails(RuntimeError("no kernel")))
    with in_step() as step:
        assert torch.equal(layer(row), expected)
        assert str(step.failure) == "no kernel"
        monkeypatch.setattr(int8_outliers, "product", pytest.fail)
        assert torch.equal(layer(row), expected)


@torch.no_grad()
def test_uninstalled(layer, searches):
    original = sys.modules["bitsandbytes"].matmul.__wrapped__
    with gemma4_compat.disabled("captured_int8"), in_step():
        assert sys.modules["bitsandbytes"].matmul is original
        layer(row_of(layer))
    assert searches == []
    (status,) = [each for each in gemma4_compat.status() if each.name == "captured_int8"]
    assert str(status.state) == "applied"
    assert status.replaces == ("bitsandbytes.matmul",)


def test_compiled_layers(layer, searches):
    compiled = torch.compile(lambda states: layer(states), backend="eager")
    row = row_of(layer)
    with torch.no_grad():
        assert torch.equal(compiled(row), layer(row))
