"""One notice says that a prompt has no ``<bos>``, and no other call of ``generate`` warns."""

from __future__ import annotations

import logging

import pytest
import torch

from gemma4_compat.model.caches import cache_name
from gemma4_compat.patches.generation import missing_bos_notice
from gemma4_compat.tiny import audio_inputs, image_inputs
from tests.support import config_of, load_model, save_random

NAME = missing_bos_notice.__name__
MISSING = "a prompt without <bos>, and no warning"
BOS, PAD = 2, 0
GOOD, BAD = torch.tensor([[BOS, 7, 8, 9, 10]]), torch.tensor([[6, 7, 8, 9, 10]])
REGRESSION = pytest.mark.regression("missing_bos_notice", MISSING)


@pytest.fixture
def model(model_dir):
    return load_model(model_dir)


@pytest.fixture
def notices(caplog):
    caplog.set_level(logging.WARNING, logger=NAME)
    return lambda: [each.getMessage() for each in caplog.records if each.name == NAME]


def generate(model, ids=None, positional=(), **options):
    if ids is not None:
        options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
    return model.generate(*positional, max_new_tokens=3, do_sample=False, **options)


def left_padded(ids, word=PAD):
    """A batch of the row, and of the row with two tokens less after two of padding."""
    short = torch.cat([torch.full((1, 2), word), ids[:, :-2]], 1)
    return {
        "input_ids": torch.cat([ids, short]),
        "attention_mask": torch.tensor([[1] * 5, [0, 0, 1, 1, 1]]),
    }


LACKING = {
    "ids": {"ids": BAD},
    "without a mask": {"input_ids": BAD},
    "by position": {"positional": (BAD,)},
    "inputs": {"inputs": BAD},
    "one row of two": {"ids": torch.cat([GOOD, BAD])},
    "left-padded": left_padded(BAD),
    "padded with <bos>": left_padded(BAD, BOS),
    "static cache": {"ids": BAD, "cache_implementation": "static"},
    "chunks": {"ids": BAD, "prefill_chunk_size": 2},
    "beams": {"ids": BAD, "num_beams": 2},
}


@REGRESSION
@pytest.mark.parametrize("case", LACKING)
def test_once_for_a_model(model, notices, case):
    for _ in range(2):
        generate(model, **LACKING[case])
    assert len(notices()) == 1, MISSING


@REGRESSION
@pytest.mark.parametrize("make", [image_inputs, audio_inputs], ids=["image", "sound"])
def test_images_and_sound(model, notices, make):
    inputs = make(model.config)
    generate(model, **inputs)
    assert not notices()
    inputs["input_ids"][:, 0] = 6
    generate(model, **inputs)
    assert len(notices()) == 1, MISSING


@REGRESSION
@pytest.mark.parametrize("family", ["Gemma4", "Gemma3n"])
def test_a_model_of_text(tmp_path, notices, family):
    save_random(family, tmp_path)
    model = config_of(family)[0].from_pretrained(tmp_path)
    generate(model, BAD)
    assert len(notices()) == 1, MISSING


@REGRESSION
def test_an_adapter(model_dir, language_adapter_dir, notices):
    from peft import PeftModel

    generate(PeftModel.from_pretrained(load_model(model_dir), language_adapter_dir), BAD)
    assert len(notices()) == 1, MISSING


def continued(model):
    output = generate(model, GOOD, return_dict_in_generate=True)
    ids, cache = output.sequences, getattr(output, cache_name())
    ids = torch.cat([ids, BAD], 1)[:, 1:] + 0
    mask = torch.ones(1, ids.shape[1] + 1, dtype=torch.long)
    return {"input_ids": BAD, "attention_mask": mask, cache_name(): cache}


QUIET = {
    "<bos>": lambda model: {"ids": GOOD},
    "left-padded": lambda model: left_padded(GOOD),
    "left-padded, without a mask": lambda model: {"input_ids": left_padded(GOOD)["input_ids"]},
    "several sequences": lambda model: {"ids": torch.cat([BAD, GOOD], 1)},
    "packed": lambda model: {"ids": BAD, "position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
    "a cache with tokens": continued,
    "no prompt": lambda model: {},
}


@pytest.mark.each_stack
@pytest.mark.parametrize("case", QUIET)
def test_no_other_call_warns(model, notices, case):
    generate(model, **QUIET[case](model))
    assert not notices()
    generate(model, BAD)
    assert notices(), "this call is looked at"


def test_embeddings(tmp_path, notices):
    save_random("Gemma4 experts", tmp_path)
    model = config_of("Gemma4 experts")[0].from_pretrained(tmp_path)
    generate(model, inputs_embeds=model.get_input_embeddings()(BAD))
    assert not notices()


def test_models_without_bos_or_from_scratch(model, notices):
    cls, config = config_of("Gemma4")
    generate(cls(config).eval(), BAD)
    model.config.text_config.bos_token_id = None
    generate(model, BAD)
    assert not notices()


def test_other_models(llama_dir, notices):
    from transformers import LlamaForCausalLM

    generate(LlamaForCausalLM.from_pretrained(llama_dir), BAD)
    assert not notices()


def test_only_the_first_prompts_are_looked_at(model, notices):
    for _ in range(8):
        generate(model, GOOD)
    generate(model, BAD)
    assert not notices()


def test_decoding_looks_at_nothing(model, notices, monkeypatch):
    """One look in each call of ``generate``, none in each token."""
    looks, look = [], missing_bos_notice._lacks_bos

    def counted(*args, **given):
        looks.append(given)
        return look(*args, **given)

    monkeypatch.setattr(missing_bos_notice, "_lacks_bos", counted)
    model.generate(GOOD, max_new_tokens=12, min_new_tokens=12)
    assert len(looks) == 1


def test_an_error_in_the_look(model, notices, monkeypatch):
    """The call goes on."""
    expected = generate(model, GOOD)
    monkeypatch.delattr("transformers.utils.import_utils.is_tracing")
    assert torch.equal(generate(model, GOOD), expected)


def test_tensors_without_values(model, notices):
    with pytest.raises((NotImplementedError, RuntimeError)):
        generate(model, BAD.to("meta"))  # as without the patch
    assert not notices()
