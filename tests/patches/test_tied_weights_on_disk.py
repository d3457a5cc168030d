"""A device map can place one of two tied weights, the embeddings or the head, on disk."""

from __future__ import annotations

import pytest
import torch

from tests.support import INPUTS, assert_same, load_model, logits, offloaded

EMBEDDING = "model.language_model.embed_tokens"
NO_VALUE = r"we need a `value` to put in on cpu|KeyError: 'lm_head\.weight'"


def loaded(model_dir, folder, device_map):
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(
        model_dir, device_map=device_map, dtype=torch.bfloat16, offload_folder=folder
    ).eval()


@pytest.mark.regression("tied_weights_on_disk", NO_VALUE)
@pytest.mark.parametrize(
    "device_map",
    [
        {EMBEDDING: "disk", "": "cpu"},
        {EMBEDDING: "disk", "model.vision_tower": "disk", "": "cpu"},
        {"model": "disk", "lm_head": "cpu"},
        {"model": "cpu", "lm_head": "disk"},
        {"model.vision_tower": "disk", "lm_head": "disk", "": "cpu"},
    ],
    ids=["embedding", "embedding and tower", "all but the head", "head", "head and tower"],
)
def test_one_of_two_tied_weights(model_dir, tmp_path, device_map):
    expected = logits(load_model(model_dir))
    model = loaded(model_dir, tmp_path, device_map)
    assert not model.lm_head.weight.is_meta
    assert_same(logits(model), expected)
    assert_same(logits(model), expected)
    if "model.vision_tower" in device_map:
        assert any(name.startswith("model.vision_tower") for name in offloaded(model))


@pytest.mark.regression("tied_weights_on_disk", NO_VALUE)
@pytest.mark.parametrize("part", [EMBEDDING, "lm_head"])
def test_the_map_says_where_they_are(model_dir, tmp_path, part):
    device_map = {part: "disk", "model.vision_tower": "disk", "": "cpu"}
    model = loaded(model_dir, tmp_path, device_map)
    logits(model)
    assert model.get_submodule(EMBEDDING).weight is model.lm_head.weight
    assert model.hf_device_map == {**device_map, part: "cpu"}
    assert device_map[part] == "disk", "the users' own map is as it was"


@pytest.mark.regression("tied_weights_on_disk", NO_VALUE)
def test_saved(model_dir, tmp_path):
    model = loaded(model_dir, tmp_path / "offload", {EMBEDDING: "disk", "": "cpu"})
    model.save_pretrained(tmp_path / "saved")
    assert_same(logits(load_model(tmp_path / "saved")), logits(load_model(model_dir)))


#: the errors with accelerate before 1.15
MIXED_UP = (
    r"KeyError: 'lm_head\.weight'|logits differ"
    r"|size of tensor|shape '\[|this looks incorrect"
)


@pytest.fixture
def tied_by_address():
    from importlib.metadata import version

    from packaging.version import Version

    if Version(version("accelerate")) >= Version("1.15"):
        pytest.skip("accelerate 1.15 does not use the addresses of weights on meta")


def both_on_disk(model_dir, folder):
    """A tower is on the CPU: older transformers do not dispatch a map that has only the disk."""
    names = {f"model.{name}": "disk" for name, _ in load_model(model_dir).model.named_children()}
    device_map = {**names, "model.vision_tower": "cpu", "lm_head": "disk"}
    model = loaded(model_dir, folder, device_map)
    assert model.hf_device_map == device_map
    return model


@pytest.mark.usefixtures("tied_by_address")
@pytest.mark.regression("tied_weights_on_disk", MIXED_UP)
def test_text_model_with_both_on_the_disk(model_dir, tmp_path):
    """Only the text model runs: the multimodal model needs other patches to run."""

    def text_logits(model):
        with torch.no_grad():
            inputs = INPUTS["text"](model.config)
            hidden = model.model.language_model(inputs["input_ids"]).last_hidden_state
            return {"text": model.lm_head(hidden).float()}

    expected = text_logits(load_model(model_dir))
    assert_same(text_logits(both_on_disk(model_dir, tmp_path)), expected)


def test_both_on_the_disk(model_dir, tmp_path):
    model = both_on_disk(model_dir, tmp_path)
    assert_same(logits(model), logits(load_model(model_dir)))
    assert model.lm_head.weight.is_meta
