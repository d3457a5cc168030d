"""The embeddings of a split model stay tied when an adapter is merged into it."""

from __future__ import annotations

import warnings

import pytest

import gemma4_compat
from tests.support import assert_same, load_model, logits, split

MAPS = {
    "lm_head": {"lm_head": "disk", "": "cpu"},
    "embed_tokens": {"model.language_model.embed_tokens": "disk", "": "cpu"},
    "both": {"model.language_model.embed_tokens": "disk", "lm_head": "disk", "": "cpu"},
}


REGRESSION = pytest.mark.regression("offloaded_tie_check", r"is no longer said to be tied")
#: With embed_tokens offloaded, a forward needs offloaded_pad_embedding.
PLACES = [pytest.param("lm_head", marks=REGRESSION), "embed_tokens", "both"]


@pytest.mark.parametrize("places", PLACES)
def test_merged_model_stays_tied(model_dir, places, tmp_path):
    from peft import LoraConfig, get_peft_model

    def merged(model):
        config = LoraConfig(target_modules=r".*language_model.*q_proj", init_lora_weights=True)
        return get_peft_model(model, config).merge_and_unload()

    expected = logits(load_model(model_dir), ("text",))  # a new adapter has no effect
    model = split(load_model(model_dir), tmp_path / "offload", MAPS[places])
    logits(model, ("text",))  # before the first forward, the ends are one tensor
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = merged(model)
    assert model.config.tie_word_embeddings, "is no longer said to be tied"
    assert not [each for each in caught if "no longer tied" in str(each.message)]
    assert_same(logits(model, ("text",)), expected)
    model.save_pretrained(tmp_path / "saved")
    assert_same(logits(load_model(tmp_path / "saved"), ("text",)), expected)


def test_ends_that_differ_are_untied(model_dir, tmp_path):
    from peft import LoraConfig, get_peft_model

    if gemma4_compat.status()["offloaded_tie_check"].state == "unaffected":
        pytest.skip("PEFT unties nothing before 0.19")
    model = split(load_model(model_dir), tmp_path / "offload", MAPS["embed_tokens"])
    logits(model, ("text",))
    config = LoraConfig(target_modules=["embed_tokens"], init_lora_weights=False)
    model = get_peft_model(model, config).eval()
    with pytest.warns(UserWarning, match="no longer tied"):
        model = model.merge_and_unload()
    assert not model.config.tie_word_embeddings
    expected = logits(model, ("text",))
    model.save_pretrained(tmp_path / "saved")
    assert_same(logits(load_model(tmp_path / "saved"), ("text",)), expected)
