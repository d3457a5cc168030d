"""Gradient checkpointing does not change the gradients."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gemma4_compat import tiny as tiny_model
from gemma4_compat.patches.training import reentrant_checkpointing
from gemma4_compat.tiny import BROAD_TARGETS, image_inputs, text_inputs
from tests.support import load_model, new_model

REENTRANT = {"use_reentrant": True}


def gradients(model, batch=None):
    """The loss of one step, on text by default, and the gradient of each parameter that has one."""
    model.train()
    batch = batch or text_inputs(model.config)
    loss = model(**{"labels": batch.get("input_ids"), **batch}).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model, expected, batch=None):
    loss, found = gradients(model, batch)
    assert loss == expected[0], "the loss differs"
    without = expected[1].keys() - found.keys()
    assert not without, f"no gradient in {len(without)} of {len(expected[1])} tensors"
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
    expected = gradients(new_model(model_dir))
    assert_same_gradients(checkpointed(new_model(model_dir), options), expected)


@pytest.mark.parametrize("options", [None, {"use_reentrant": False}], ids=["default", "False"])
def test_gradients_of_a_model_that_is_not(model_dir, options):
    expected = gradients(new_model(model_dir))
    assert_same_gradients(checkpointed(new_model(model_dir), options), expected)


def prepared_for_4bit_training(model_dir, **options):
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = prepare_model_for_kbit_training(new_model(model_dir, "nf4-nested"), **options)
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
    expected = gradients(new_model(model_dir))
    model = checkpointed(new_model(model_dir), REENTRANT)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    assert_same_gradients(model, expected)


def test_every_second_layer(model_dir):
    model = new_model(model_dir)
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this transformers has no activation_checkpointing_enable")
    model.activation_checkpointing_enable(REENTRANT, every_n_layers=2)
    layers = model.model.language_model.layers
    assert sum(layer.gradient_checkpointing for layer in layers) == len(layers) // 2
    assert_same_gradients(model, gradients(new_model(model_dir)))


@pytest.mark.parametrize(
    ("options", "level"),
    [(REENTRANT, "WARNING"), ({}, "INFO"), (None, None), ({"use_reentrant": False}, None)],
)
def test_what_is_said(model_dir, options, level, caplog):
    model = new_model(model_dir)
    with caplog.at_level(logging.INFO, logger="gemma4_compat.patches"):
        checkpointed(model, options)
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("gemma4_")]
    assert [name for name, _ in said] == ([] if level is None else [level])
    for _, text in said:
        assert "Gemma4ForConditionalGeneration uses use_reentrant=False" in text


def tiny(kind, **options):
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
        "Llama": (("LlamaConfig", "LlamaForCausalLM"), {}),
    }[kind]
    if not hasattr(transformers, names[0]):
        pytest.skip(f"this transformers has no {names[0]}")
    config, model = (getattr(transformers, name) for name in names)
    torch.manual_seed(0)
    return model(config(**{**sizes, **special, **options})).float()


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


def test_other_models_keep_what_they_were_given(caplog):
    with caplog.at_level(logging.INFO, logger="gemma4_compat.patches"):
        for options in (REENTRANT, {}):
            model = checkpointed(tiny("Llama"), options)
            given = model.model.layers[0]._gradient_checkpointing_func
            assert given.func is checkpoint
            assert given.keywords == options
    assert not [r for r in caplog.records if r.name.startswith("gemma4_compat")]


@pytest.mark.parametrize("folder", ["model_dir", "unshared_dir"])
def test_other_checkpoint_functions_are_left_alone(folder, request):
    def own(function, *args, **kwargs):
        return function(*args)

    model = load_model(request.getfixturevalue(folder))
    for function in (own, partial(own, option=1)):
        model._set_gradient_checkpointing(True, function)
        assert model.model.language_model.layers[0]._gradient_checkpointing_func is function


def test_bare_checkpoint_function(model_dir):
    expected = gradients(new_model(model_dir))
    model = new_model(model_dir)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
    model.enable_input_require_grads()
    assert_same_gradients(model, expected)


@pytest.fixture(scope="module")
def unshared_dir(tmp_path_factory):
    """A tiny model like 26B-A4B: experts and a vision tower, no shared keys; bfloat16."""
    from transformers import Gemma4ForConditionalGeneration

    config = tiny_model._config()
    config.audio_config = None
    text = config.text_config
    text.num_kv_shared_layers = text.hidden_size_per_layer_input = 0
    text.use_double_wide_mlp, text.enable_moe_block = False, True
    text.num_experts, text.top_k_experts, text.moe_intermediate_size = 4, 2, 64
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma4ForConditionalGeneration(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_tokens" not in name:
                torch.nn.init.normal_(parameter, std=0.05)
    folder = tmp_path_factory.mktemp("unshared")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def with_adapter(model, *towers):
    from peft import LoraConfig, get_peft_model

    # the wrapped layers of the vision tower, which each PEFT can adapt
    layers = {
        "language": r".*language_model.*[qv]_proj",
        "vision": r".*vision_tower.*[qv]_proj.linear",
    }
    targets = "|".join(layers[tower] for tower in towers)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def with_frozen_inputs(model):
    """The layers alone are trained, and no hook makes their inputs need a gradient."""
    if getattr(model, "_require_grads_hooks", None):
        model.disable_input_require_grads()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers." in name)
    return model


def embeddings(model):
    """Text as ``inputs_embeds`` that need no gradient."""
    ids = text_inputs(model.config)["input_ids"]
    return {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "labels": ids}


WITHOUT_GRADIENT = {
    "pixels": (lambda model: with_adapter(model, "vision"), image_inputs),
    "pixels and text": (
        lambda model: with_adapter(model, "vision", "language"),
        image_inputs,
    ),
    "embeddings": (lambda model: with_adapter(model, "language"), embeddings),
    "frozen inputs": (with_frozen_inputs, image_inputs),
}


@pytest.mark.regression("reentrant_checkpointing", r"no gradient|does not require grad")
@pytest.mark.parametrize("options", [REENTRANT, {}], ids=["asked for", "torch's default"])
@pytest.mark.parametrize("kind", WITHOUT_GRADIENT)
def test_layers_whose_inputs_need_no_gradient(unshared_dir, kind, options):
    prepare, inputs = WITHOUT_GRADIENT[kind]
    batch = inputs(load_model(unshared_dir)) if kind == "embeddings" else None
    batch = batch or inputs(load_model(unshared_dir).config)
    expected = gradients(prepare(load_model(unshared_dir)), batch)
    assert any(gradient.any() for gradient in expected[1].values())
    model = prepare(checkpointed(load_model(unshared_dir), options))
    assert_same_gradients(model, expected, batch)


@pytest.mark.regression("reentrant_checkpointing", r"does not require grad")
@pytest.mark.parametrize("kind", ["Gemma3n", "Gemma4Unified"])
def test_relatives_whose_inputs_need_no_gradient(kind):
    tokens = torch.arange(3, 15)[None]
    batch = {"input_ids": tokens, "use_cache": False}
    expected = gradients(with_frozen_inputs(tiny(kind, num_kv_shared_layers=0)), batch)
    model = with_frozen_inputs(checkpointed(tiny(kind, num_kv_shared_layers=0), REENTRANT))
    assert_same_gradients(model, expected, batch)


@pytest.mark.regression("reentrant_checkpointing", r"no gradient")
def test_vision_tower_after_prepare_model_for_kbit_training(unshared_dir):
    from peft import prepare_model_for_kbit_training

    def prepared(**options):
        model = load_model(unshared_dir, "nf4")
        return with_adapter(prepare_model_for_kbit_training(model, **options), "vision")

    plain, model = prepared(use_gradient_checkpointing=False), prepared()
    batch = image_inputs(model.config)
    assert model.is_gradient_checkpointing
    assert_same_gradients(model, gradients(plain, batch), batch)


@pytest.mark.regression("reentrant_checkpointing", r"the adapter is not trained")
def test_vision_tower_in_trainer(unshared_dir, tmp_path):
    from transformers import Trainer, TrainingArguments

    def trained(**options):
        model = with_adapter(load_model(unshared_dir), "vision")
        data = [{name: value[0] for name, value in image_inputs(model.config).items()}] * 2
        data = [{**row, "labels": row["input_ids"]} for row in data]
        before = adapter_state(model)
        arguments = TrainingArguments(
            output_dir=tmp_path,
            max_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            **options,
        )
        Trainer(model=model, args=arguments, train_dataset=data).train()
        return before, adapter_state(model)

    before, expected = trained()
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT}
    _, found = trained(**options)
    same = [name for name, tensor in found.items() if torch.equal(tensor, before[name])]
    assert not same, "the adapter is not trained"
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def adapter_state(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}


def test_a_frozen_tower_runs_once(unshared_dir):
    """Nothing is computed for a gradient that nobody needs, and the variant stays reentrant."""
    model = with_adapter(checkpointed(load_model(unshared_dir), REENTRANT), "language")
    runs = {"vision": 0, "language": 0}
    base = model.get_base_model().model
    layers = {"vision": base.vision_tower.encoder.layers, "language": base.language_model.layers}
    for tower, modules in layers.items():

        def count(*_, tower=tower):
            runs[tower] += 1

        modules[0].mlp.register_forward_hook(count)
        given = modules[0]._gradient_checkpointing_func
        assert (given.args[0].func, given.args[0].keywords) == (checkpoint, REENTRANT)
    gradients(model, image_inputs(model.config))
    assert runs == {"vision": 1, "language": 2}


def test_releases_that_choose_the_variant(monkeypatch):
    """A choice by shared keys mends half of the bug."""
    from transformers import PreTrainedModel

    def always(self, enable=True, gradient_checkpointing_func=None):
        return partial(gradient_checkpointing_func, use_reentrant=False)

    def by_keys(self, enable=True, gradient_checkpointing_func=None):
        return self.config.num_kv_shared_layers and always(self, enable)

    for choice, verdict in ((always, "FIXED"), (by_keys, "BROKEN")):
        monkeypatch.setattr(PreTrainedModel, "_set_gradient_checkpointing", choice)
        assert reentrant_checkpointing.PATCH.probe_function().verdict.name == verdict
