"""Models that attend to images in both directions can be trained on text."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

from gemma4_compat.tiny import audio_inputs, image_inputs, text_inputs
from tests.support import load_model

REQUIRED = Version(transformers.__version__) < Version("5.6")


@pytest.fixture
def large(model_dir):
    """Load the checkpoint with the attention of the large models, in training mode."""

    def load():
        model = load_model(model_dir)
        model.config.text_config.use_bidirectional_attention = "vision"
        return model.train()

    return load


def step(model, batch):
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def without_types(batch):
    return {name: value for name, value in batch.items() if name != "mm_token_type_ids"}


@pytest.mark.regression("mm_token_type_ids", r"`mm_token_type_ids` is required as a model input")
@pytest.mark.parametrize("make", [text_inputs, audio_inputs], ids=["text", "audio"])
def test_step_without_token_types(large, make):
    model = large()
    batch = make(model.config, batch=2)
    expected_loss, expected = step(model, batch)
    loss, found = step(large(), without_types(batch))
    assert loss == expected_loss
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.skipif(not REQUIRED, reason="later releases may want token ids beside embeddings")
@pytest.mark.regression("mm_token_type_ids", r"`mm_token_type_ids` is required as a model input")
def test_embeddings_in_place_of_ids(model_dir):
    from transformers import AutoConfig, Gemma4ForConditionalGeneration

    config = AutoConfig.from_pretrained(model_dir)
    config.text_config.use_bidirectional_attention = "vision"
    config.text_config.hidden_size_per_layer_input = 0  # as in the large models
    model = Gemma4ForConditionalGeneration(config).train()
    batch = text_inputs(config)
    expected = model(**batch).logits
    embeddings = model.get_input_embeddings()(batch["input_ids"])
    found = model(inputs_embeds=embeddings, attention_mask=batch["attention_mask"]).logits
    assert torch.equal(found, expected)


@pytest.mark.skipif(not REQUIRED, reason="this transformers takes images without token types")
def test_token_types_of_images_are_not_made_up(large):
    model = large()
    with pytest.raises(ValueError, match="`mm_token_type_ids` is required"):
        model(**without_types(image_inputs(model.config)))


def test_positional_arguments(large):
    model = large()
    batch = text_inputs(model.config)
    expected = model.model(**batch).last_hidden_state
    found = model.model(batch["input_ids"], attention_mask=batch["attention_mask"])
    assert torch.equal(found.last_hidden_state, expected)
    mask = {"attention_mask": batch["attention_mask"]}
    assert torch.equal(model.model(batch["input_ids"], None, **mask).last_hidden_state, expected)
