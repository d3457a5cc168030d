"""Caches of models without shared keys and values have sliding layers.

Attention over a cache of another length adds in another order.  The logits are at most 30, and may
differ by a few units in the last place of float32.
"""

from __future__ import annotations

import pytest
import torch

import gemma4_compat
from gemma4_compat.model.caches import cache_name
from gemma4_compat.tiny import image_inputs, text_inputs
from tests.large_model import SLIDING_WINDOW, large_config, large_model

TOLERANCE = 3e-5
#: With the prompt of 12 tokens, these are far more tokens than the sliding window.
NEW_TOKENS = 20
INPUTS = {"text": text_inputs, "image": image_inputs}


def generated(model, kind="text", batch=1, **options):
    """The logits of each new token."""
    output = model.generate(
        **INPUTS[kind](model.config, batch=batch),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        eos_token_id=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return torch.stack(output.logits)


def assert_close(found, expected):
    worst = (found - expected).abs().max().item()
    assert worst <= TOLERANCE, f"logits differ by up to {worst:.3g}"


def sliding(cache):
    return ["sliding_attention" if layer.is_sliding else "full_attention" for layer in cache.layers]


def generated_alone(model, kind="text", **options):
    """The logits of each new token, and the cache, of a call that returns neither."""
    caches, logits = [], []

    def see(module, args, kwargs):
        caches.append(kwargs[cache_name()])

    def keep(tokens, scores):
        logits.append(scores.clone())
        return scores

    hook = model.register_forward_pre_hook(see, with_kwargs=True)
    model.generate(
        **INPUTS[kind](model.config),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        logits_processor=[keep],
        **options,
    )
    hook.remove()
    assert all(cache is caches[0] for cache in caches)
    return torch.stack(logits), caches[0]


@pytest.mark.regression("sliding_cache_layers", r"layer 0 keeps 31 tokens")
def test_a_dynamic_cache_forgets(model_dir):
    model = large_model(model_dir)
    _, cache = generated_alone(model)
    tokens = text_inputs(model.config)["input_ids"].shape[1] + NEW_TOKENS - 1
    types = zip(cache.layers, model.config.text_config.layer_types, strict=True)
    for index, (layer, kind) in enumerate(types):
        kept = layer.keys.shape[-2]
        expected = SLIDING_WINDOW - 1 if kind == "sliding_attention" else tokens
        assert kept == expected, f"layer {index} keeps {kept} tokens"


@pytest.mark.parametrize("kind", INPUTS)
def test_sliding_layers_give_what_full_layers_give(model_dir, kind):
    from transformers import DynamicCache

    model = large_model(model_dir)
    expected = generated(model, kind, past_key_values=DynamicCache())
    assert_close(generated_alone(model, kind)[0], expected)
    assert_close(generated(model, kind), expected)
    assert_close(generated(model, kind, use_cache=False), expected)


def caches_of_the_user(model):
    """Caches that a user makes or gets; each has the prompt's tokens, or more."""
    from transformers import DynamicCache

    prompt, seen = text_inputs(model.config), []

    def decode(model, input_ids, **kwargs):
        seen.append(kwargs[cache_name()])
        model(input_ids=input_ids, past_key_values=seen[-1])
        return input_ids

    model.generate(**prompt, custom_generate=decode, max_new_tokens=2)
    own, options = DynamicCache(config=model.config), {"max_new_tokens": 3}
    with torch.no_grad():
        model(**prompt, past_key_values=own)
        made = model(**prompt, use_cache=True).past_key_values
    returned = model.generate(**prompt, **options, return_dict_in_generate=True).past_key_values
    return [own, made, returned, *seen]


def test_a_cache_that_the_user_gets_is_as_without_the_patch(model_dir):
    """Code that crops it, or fills another cache with its keys, relies on its length."""
    model = large_model(model_dir)
    found = caches_of_the_user(model)
    with gemma4_compat.disabled("sliding_cache_layers"):
        expected = caches_of_the_user(model)
    assert len(found) == 4
    for cache, other in zip(found, expected, strict=True):
        for layer, like in zip(cache.layers, other.layers, strict=True):
            assert type(layer) is type(like)
            assert torch.equal(layer.keys, like.keys)


@pytest.mark.regression("sliding_cache_layers", r"IndexError: list index out of range")
def test_a_static_cache(model_dir):
    import transformers
    from packaging.version import Version
    from transformers import StaticCache

    if Version("5.10.1") <= Version(transformers.__version__) < Version("5.14"):
        pytest.skip("static caches were mended before dynamic ones")
    model = large_model(model_dir)
    expected = generated(model)
    assert_close(generated(model, cache_implementation="static"), expected)
    assert_close(generated(model, cache_implementation="static"), expected)  # cache may be reused
    config = model.config
    cache = StaticCache(config=config, max_cache_len=32)
    assert sliding(cache) == config.text_config.layer_types


def test_a_batch_with_padding_in_a_static_cache(model_dir):
    model = large_model(model_dir)
    inputs = text_inputs(model.config, batch=2)
    inputs["attention_mask"][0, :3] = 0
    found, expected = (
        model.generate(
            **inputs, **options, max_new_tokens=8, output_logits=True, return_dict_in_generate=True
        )
        for options in ({"cache_implementation": "static"}, {})
    )
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))


def test_prompt_lookup_beyond_the_window(model_dir):
    """Prompt lookup removes tokens from the cache, which sliding layers cannot do."""
    model = large_model(model_dir)
    assert_close(generated(model, prompt_lookup_num_tokens=3), generated(model))


def test_assisted_generation_beyond_the_window(model_dir):
    model = large_model(model_dir)
    assert_close(generated(model, assistant_model=large_model(model_dir)), generated(model))


def test_a_cache_that_is_given_is_used(model_dir):
    from transformers import DynamicCache

    model = large_model(model_dir)
    cache = DynamicCache(config=model.config)
    prompt = text_inputs(model.config)
    first = model.generate(**prompt, past_key_values=cache, max_new_tokens=4, min_new_tokens=4)
    assert cache.get_seq_length() == first.shape[1] - 1
    expected = model.generate(**prompt, max_new_tokens=8, min_new_tokens=8)
    again = {"input_ids": first, "attention_mask": torch.ones_like(first)}
    assert torch.equal(
        model.generate(**again, past_key_values=cache, max_new_tokens=4, min_new_tokens=4), expected
    )


def test_models_that_share_are_as_ever(model_dir):
    from transformers import DynamicCache, Gemma4Config, StaticCache

    config = Gemma4Config.from_pretrained(model_dir)
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=16)):
        # newer releases have placeholders for the layers that share keys and values
        layers = [layer for layer in cache.layers if hasattr(layer, "is_sliding")]
        assert [layer.is_sliding for layer in layers] == [True, True, False]


def test_other_models_are_as_ever(llama_dir):
    from transformers import AutoConfig, DynamicCache, StaticCache

    config = AutoConfig.from_pretrained(llama_dir)
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=16)):
        assert sliding(cache) == ["full_attention"] * 2
    assert DynamicCache().layers == []


def test_a_cache_is_made_in_a_compiled_forward(model_dir):
    model = large_model(model_dir).model.language_model
    tokens = text_inputs(large_config(model_dir))["input_ids"]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = model(tokens, use_cache=True)
        found = compiled(tokens, use_cache=True)
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    assert sliding(found.past_key_values) == sliding(expected.past_key_values)


def test_a_subclass_and_a_copy(model_dir):
    import copy
    import pickle

    from transformers import DynamicCache

    cache = Subclass(config=large_config(model_dir))
    assert type(pickle.loads(pickle.dumps(cache))) is type(copy.deepcopy(cache)) is Subclass
    assert sliding(copy.deepcopy(cache)) == sliding(DynamicCache(config=large_config(model_dir)))


def _subclass():
    from transformers import DynamicCache

    class Subclass(DynamicCache):
        pass

    Subclass.__qualname__ = "Subclass"
    return Subclass


Subclass = _subclass()
