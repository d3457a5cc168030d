"""Layers share keys and values with a cache and without one."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import text_inputs
from tests.support import INPUTS, assert_same, load_model, logits, split


def logits_with(model, use_cache):
    found = {}
    with torch.no_grad():
        for kind in INPUTS:
            output = model(**INPUTS[kind](model.config), use_cache=use_cache)
            assert (output.past_key_values is not None) is use_cache
            found[kind] = output.logits.float()
    return found


def gradients(model, **options):
    model.train()
    batch = text_inputs(model.config)
    loss = model(**batch, labels=batch["input_ids"], **options).loss
    loss.backward()
    used = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {n: grad for n, grad in used.items() if grad.any()}


def assert_same_step(found, expected):
    assert found[0] == expected[0], f"the loss differs: {found[0]:.4f}, not {expected[0]:.4f}"
    assert found[1].keys() == expected[1].keys()
    wrong = [name for name in expected[1] if not torch.equal(found[1][name], expected[1][name])]
    assert not wrong, f"gradients differ in {wrong}"


@pytest.mark.regression("kv_sharing_without_cache", r"text logits differ")
def test_logits_without_a_cache(model_dir):
    model = load_model(model_dir)
    assert_same(logits_with(model, False), logits_with(model, True))


@pytest.mark.regression(
    "kv_sharing_without_cache", r"the loss differs", then="reentrant_checkpointing"
)
@pytest.mark.parametrize("options", [None, {"use_reentrant": True}], ids=["default", "reentrant"])
def test_training_with_gradient_checkpointing(model_dir, options):
    expected = gradients(load_model(model_dir), use_cache=True)
    model = load_model(model_dir)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    assert_same_step(gradients(model), expected)


@pytest.mark.regression("kv_sharing_without_cache", r"the loss differs")
def test_training_without_a_cache(model_dir):
    expected = gradients(load_model(model_dir), use_cache=True)
    assert_same_step(gradients(load_model(model_dir), use_cache=False), expected)


def test_generate_without_a_cache(model_dir):
    model = load_model(model_dir)
    prompt = text_inputs(model.config)
    tokens = [model.generate(**prompt, max_new_tokens=4, use_cache=use) for use in (True, False)]
    assert torch.equal(*tokens)


def test_offloaded_layers(model_dir, tmp_path):
    expected = logits(load_model(model_dir))
    layers = {f"model.language_model.layers.{index}": "disk" for index in (1, 2, 4)}
    model = split(load_model(model_dir), tmp_path, {**layers, "": "cpu"})
    assert_same(logits_with(model, False), expected)


def test_compiled_without_a_cache(model_dir):
    model = load_model(model_dir)
    inputs = text_inputs(model.config)
    with torch.no_grad():
        expected = model(**inputs, use_cache=True).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(**inputs, use_cache=False).logits, expected)
