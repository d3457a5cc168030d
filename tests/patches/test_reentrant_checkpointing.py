"""Gradient checkpointing does not change the gradients."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gemma4_compat.tiny import BROAD_TARGETS, text_inputs
from tests.support import load_model

REENTRANT = {"use_reentrant": True}


def gradients(model):
    """The loss of one step on text, and the gradient of every parameter that has one."""
    model.train()
    batch = text_inputs(model.config)
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model, expected):
    loss, found = gradients(model)
    assert loss == expected[0], "the loss differs"
    assert found.keys() == expected[1].keys()
    wrong = [
        name for name, gradient in found.items() if not torch.equal(gradient, expected[1][name])
    ]
    assert not wrong, f"gradients differ in {len(wrong)} of {len(found)} tensors, {wrong[:2]}"


def checkpointed(model, options):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    assert model.is_gradient_checkpointing
    return model


@pytest.mark.regression("reentrant_checkpointing", r"gradients differ|loss differs")
@pytest.mark.parametrize("options", [REENTRANT, {}], ids=["asked for", "torch's default"])
def test_gradients_of_a_reentrant_model(model_dir, options):
    expected = gradients(load_model(model_dir))
    assert_same_gradients(checkpointed(load_model(model_dir), options), expected)


@pytest.mark.parametrize("options", [None, {"use_reentrant": False}], ids=["default", "False"])
def test_gradients_of_a_model_that_is_not(model_dir, options):
    expected = gradients(load_model(model_dir))
    assert_same_gradients(checkpointed(load_model(model_dir), options), expected)


def prepared_for_4bit_training(model_dir, **options):
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = prepare_model_for_kbit_training(load_model(model_dir, "nf4-nested"), **options)
    torch.manual_seed(0)
    targets = rf".*\.language_model\..*\.({'|'.join(BROAD_TARGETS)})"
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


@pytest.mark.regression("reentrant_checkpointing", r"gradients differ|loss differs")
@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing_kwargs": REENTRANT}], ids=["default", "asked for"]
)
def test_gradients_after_prepare_model_for_kbit_training(model_dir, options):
    expected = gradients(prepared_for_4bit_training(model_dir, use_gradient_checkpointing=False))
    model = prepared_for_4bit_training(model_dir, **options)
    assert model.is_gradient_checkpointing
    assert_same_gradients(model, expected)


def test_disabled_again(model_dir):
    expected = gradients(load_model(model_dir))
    model = checkpointed(load_model(model_dir), REENTRANT)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    assert_same_gradients(model, expected)


def test_every_second_layer(model_dir):
    model = load_model(model_dir)
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this transformers has no activation_checkpointing_enable")
    model.activation_checkpointing_enable(REENTRANT, every_n_layers=2)
    layers = model.model.language_model.layers
    assert sum(layer.gradient_checkpointing for layer in layers) == len(layers) // 2
    assert_same_gradients(model, gradients(load_model(model_dir)))


@pytest.mark.parametrize(
    ("options", "level"),
    [(REENTRANT, "WARNING"), ({}, "INFO"), (None, None), ({"use_reentrant": False}, None)],
)
def test_what_is_said(model_dir, options, level, caplog):
    model = load_model(model_dir)
    with caplog.at_level(logging.INFO, logger="gemma4_compat.patches"):
        checkpointed(model, options)
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("gemma4_")]
    assert [name for name, _ in said] == ([] if level is None else [level])
    for _, text in said:
        assert "Gemma4ForConditionalGeneration uses use_reentrant=False" in text


def tiny(kind):
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "pad_token_id": 0,
    }
    hybrid = {
        "sliding_window": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }
    gemma3n = {"intermediate_size": [32] * 6, "activation_sparsity_pattern": [0.0] * 6}
    gemma3n |= {"altup_num_inputs": 2, "laurel_rank": 4}
    names, special = {
        "Gemma3n": (("Gemma3nTextConfig", "Gemma3nForCausalLM"), {**hybrid, **gemma3n}),
        "Gemma4Unified": (("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM"), hybrid),
        "Gemma4 without shared keys": (
            ("Gemma4TextConfig", "Gemma4ForCausalLM"),
            {**hybrid, "num_kv_shared_layers": 0},
        ),
        "Llama": (("LlamaConfig", "LlamaForCausalLM"), {}),
    }[kind]
    if not hasattr(transformers, names[0]):
        pytest.skip(f"this transformers has no {names[0]}")
    config, model = (getattr(transformers, name) for name in names)
    torch.manual_seed(0)
    return model(config(**{**sizes, **special})).float()


@pytest.mark.parametrize("kind", ["Gemma3n", "Gemma4Unified"])
def test_relatives_that_share_keys(kind):
    def step(model):
        tokens = torch.arange(3, 15)[None]
        model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected = step(tiny(kind))
    found = step(checkpointed(tiny(kind), REENTRANT))
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("kind", ["Llama", "Gemma4 without shared keys"])
def test_other_models_keep_what_they_were_given(kind, caplog):
    with caplog.at_level(logging.INFO, logger="gemma4_compat.patches"):
        for options in (REENTRANT, {}):
            model = checkpointed(tiny(kind), options)
            given = model.model.layers[0]._gradient_checkpointing_func
            assert given.func is checkpoint
            assert given.keywords == options
    assert not [r for r in caplog.records if r.name.startswith("gemma4_compat")]


def test_other_checkpoint_functions_are_left_alone(model_dir):
    def own(function, *args, **kwargs):
        return function(*args)

    model = load_model(model_dir)
    for function in (own, partial(own, option=1)):
        model._set_gradient_checkpointing(True, function)
        assert model.model.language_model.layers[0]._gradient_checkpointing_func is function


def test_bare_checkpoint_function(model_dir):
    expected = gradients(load_model(model_dir))
    model = load_model(model_dir)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
    model.enable_input_require_grads()
    assert_same_gradients(model, expected)
