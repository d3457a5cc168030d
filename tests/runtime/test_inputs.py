"""The inputs of captured steps equal those that transformers makes."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from gemma4_compat.model.caches import cache_name
from gemma4_compat.runtime.capture import decoding, inputs
from gemma4_compat.tiny import image_inputs
from tests.pretended_gpu import pretend
from tests.support import new_model

NEW_TOKENS = 12  # the window has 8


@pytest.fixture
def model(model_dir, monkeypatch):
    pretend(monkeypatch)
    return new_model(model_dir)


@pytest.fixture
def compared(monkeypatch):
    """Transformers makes all inputs too; the list says of each step who made those in use."""
    steps, ours = [], []
    original, make_ours = decoding.Decoder.prepared, inputs.Inputs.made

    def made(self, *args):
        ours.append(make_ours(self, *args))
        return ours[-1]

    def prepared(self, make, arguments):
        expected = make()
        ours.clear()
        found = original(self, make, arguments)
        steps.append("we" if any(found is each for each in ours) else "transformers")
        assert [*found] == [*expected]
        assert all(map(same, found.values(), expected.values()))
        return found

    monkeypatch.setattr(inputs.Inputs, "made", made)
    monkeypatch.setattr(decoding.Decoder, "prepared", prepared)
    return steps


def same(found, expected):
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[n], expected[n]) for n in found)
    if not isinstance(expected, torch.Tensor) or found is expected:
        return found is expected
    likes = [(each.shape, each.dtype, each.stride()) for each in (found, expected)]
    return likes[0] == likes[1] and torch.equal(found, expected)


def prompt(length=2, batch=1):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 400, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate(model, given, tokens=NEW_TOKENS, **options):
    options.setdefault("cache_implementation", "static")
    return model.generate(
        **given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options
    )


def check(model, steps, given, **options):
    """Our inputs equal those of transformers, and the tokens those of eager decoding."""
    eager = generate(model, given, disable_compile=True, **options)
    assert steps == []
    assert torch.equal(generate(model, given, **options), eager)
    assert steps.count("we") > NEW_TOKENS - 6


@pytest.mark.parametrize(("length", "batch"), [(2, 1), (12, 1), (2, 3)])
def test_without_padding(model, compared, length, batch):
    check(model, compared, prompt(length, batch))


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_padded_batch(model, compared, dtype):
    given = prompt(5, 3)
    for row in range(3):
        given["attention_mask"][row, : 2 * row] = 0
    given["attention_mask"] = given["attention_mask"].to(dtype)
    check(model, compared, given)


def test_a_hole_in_the_mask(model, compared):
    given = prompt(12)
    given["attention_mask"][0, [3, 7, 9]] = 0
    check(model, compared, given)


def test_image_prompt(model, compared):
    check(model, compared, image_inputs(model.config))


def test_chunked_prefill(model, compared):
    check(model, compared, prompt(12), prefill_chunk_size=4)


def test_adapter(model, compared, adapter_dir):
    from peft import PeftModel

    check(PeftModel.from_pretrained(model, adapter_dir), compared, prompt())


def test_calls_with_a_cache_of_the_user(model, compared):
    from transformers import StaticCache

    def chat(**options):
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=60)
        options |= {"past_key_values": cache, "cache_implementation": None}
        ids = prompt(4)["input_ids"]
        for _ in range(3):
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            ids = torch.cat([generate(model, given, **options), prompt(3)["input_ids"]], dim=1)
        return ids

    expected = chat(disable_compile=True)
    assert torch.equal(chat(), expected)
    assert compared.count("we") > 3 * (NEW_TOKENS - 6)


# -- what transformers makes ----------------------------------------------------------------------


def transformers_makes_all(model, steps, given=None, **options):
    given = prompt() if given is None else given
    assert torch.equal(
        generate(model, given, **options), generate(model, given, disable_compile=True, **options)
    )
    assert set(steps) == {"transformers"}


def test_masks_of_another_attention(model, compared):
    model.set_attn_implementation("eager")
    transformers_makes_all(model, compared)


def test_masks_of_the_users_own_functions(model, compared, monkeypatch):
    sdpa, make = masking_utils.sdpa_mask, masking_utils.create_masks_for_generate
    with monkeypatch.context() as patch:
        table = type(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping
        patch.setitem(table, "sdpa", lambda *args, **kwargs: sdpa(*args, **kwargs))
        transformers_makes_all(model, compared)
    compared.clear()
    own = getattr(model, "create_masks_for_generate", make)
    model.create_masks_for_generate = lambda **kwargs: own(**kwargs)
    transformers_makes_all(model, compared)


def test_other_masks_than_ours(model, compared, monkeypatch):
    """As if a release of transformers made other masks."""
    original = inputs._input

    def other(name, *args):
        made = original(name, *args)
        return {n: ~each for n, each in made.items()} if name == "attention_mask" else made

    monkeypatch.setattr(inputs, "_input", other)
    transformers_makes_all(model, compared)


@pytest.mark.parametrize("name", ["kind_of_step", "_input", "_equal"])
def test_an_error_of_ours(model, compared, monkeypatch, name):
    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decoding if name == "kind_of_step" else inputs, name, fail)
    transformers_makes_all(model, compared)


def test_an_error_of_the_user(model):
    """It is raised, and from one call."""
    calls, original = [], model.create_masks_for_generate

    def masks(**kwargs):
        calls.append(kwargs)
        if len(calls) == 5:
            raise ValueError("the user's")
        return original(**kwargs)

    generate(model, prompt())
    model.create_masks_for_generate = masks
    with pytest.raises(ValueError, match="the user's"):
        generate(model, prompt())
    assert len(calls) == 5


def test_other_calls_during_a_generation(model, compared):
    """They have other caches."""
    from transformers import LogitsProcessorList, StaticCache

    expected = [generate(model, prompt(n), disable_compile=True) for n in (2, 3)]
    shared = hasattr(model, "_cache")  # by all calls, in this transformers

    def processor(ids, scores):
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=40)
        given = {"attention_mask": torch.ones_like(ids), cache_name(): cache}
        assert torch.equal(model.prepare_inputs_for_generation(ids, **given)["input_ids"], ids)
        if ids.shape[1] == 7 and not shared:
            assert torch.equal(generate(model, prompt(3)), expected[1])
        return scores

    found = generate(model, prompt(), logits_processor=LogitsProcessorList([processor]))
    assert torch.equal(found, expected[0])
    assert compared.count("we") > NEW_TOKENS - 6


def test_kinds_are_bounded():
    own = inputs.Inputs()
    for number in range(20):
        if own.can_learn(number):
            own.learn(number, {"input_ids": None}, {"input_ids": None}, 1)
    assert len(own.rules) <= 8
