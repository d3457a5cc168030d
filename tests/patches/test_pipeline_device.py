"""A pipeline of a split model computes on the device of its inputs."""

from __future__ import annotations

import pytest
import torch

import gemma4_compat
from tests.support import load_model, split

DISK = r"device type at start of device string: disk"
LANGUAGE = "model.language_model"
MAPS = {
    "tower": {"model.vision_tower": "disk", "": "cpu"},
    "embeddings": {f"{LANGUAGE}.embed_tokens": "disk", "": "cpu"},
}
TEXT = "w5 w7 w9 w11"


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{token}": token for token in range(512)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w3"
    )


def answer(pipe):
    return pipe(TEXT, max_new_tokens=8, do_sample=False)[0]["generated_text"]


def make(model, tokenizer, **options):
    from transformers import pipeline

    return pipeline("text-generation", model=model, tokenizer=tokenizer, **options)


@pytest.mark.regression("pipeline_device", DISK)
@pytest.mark.parametrize("offloaded", MAPS)
def test_same_as_on_one_device(model_dir, tmp_path, tokenizer, offloaded):
    expected = answer(make(load_model(model_dir), tokenizer, device="cpu"))
    model = split(load_model(model_dir), tmp_path, MAPS[offloaded])
    before = dict(model.hf_device_map)
    pipe = make(model, tokenizer)
    assert pipe.device == gemma4_compat.input_device(model)
    assert model.hf_device_map == before
    assert answer(pipe) == expected


@pytest.mark.regression("pipeline_device", DISK)
def test_other_pipelines(model_dir, tmp_path):
    """The base class chooses the device for all tasks, including those with images."""
    from transformers import Pipeline

    class Mine(Pipeline):
        def _sanitize_parameters(self, **options):
            return {}, {}, {}

        preprocess = _forward = postprocess = lambda self, value, **options: value

    model = split(load_model(model_dir), tmp_path, MAPS["tower"])
    assert Mine(model=model, task="image-text-to-text").device == torch.device("cpu")


@pytest.mark.regression("pipeline_device", DISK)
def test_with_an_adapter(model_dir, tmp_path, tokenizer):
    peft = pytest.importorskip("peft")
    config = {"r": 4, "target_modules": r".*language_model\.layers\.\d+\.mlp\.up_proj"}

    def adapted(base):
        torch.manual_seed(0)
        return peft.get_peft_model(base, peft.LoraConfig(**config, init_lora_weights=False))

    expected = answer(make(adapted(load_model(model_dir)).model, tokenizer, device="cpu"))
    model = adapted(split(load_model(model_dir), tmp_path, MAPS["tower"])).model
    assert answer(make(model, tokenizer)) == expected


@pytest.mark.parametrize("device_map", [{"": "cpu", "model.vision_tower": "disk"}])
def test_a_map_that_begins_with_a_device(model_dir, tmp_path, tokenizer, device_map):
    model = split(load_model(model_dir), tmp_path, device_map)
    pipe = make(model, tokenizer)
    assert pipe.device == torch.device("cpu")
    with pytest.raises(ValueError, match="discard the `device` argument"):
        make(model, tokenizer, device="cpu")


def test_a_given_device_is_refused_as_before(model_dir, tmp_path, tokenizer):
    model = split(load_model(model_dir), tmp_path, MAPS["tower"])
    with pytest.raises(ValueError, match="discard the `device` argument"):
        make(model, tokenizer, device="cpu")


@pytest.mark.cuda
@pytest.mark.regression("pipeline_device", r"the device is cpu")
def test_on_a_gpu(model_dir, tokenizer):
    expected = answer(make(load_model(model_dir, device_map={"": 0}), tokenizer))
    model = load_model(model_dir, device_map={"model.vision_tower": "cpu", "": 0})
    pipe = make(model, tokenizer)
    assert pipe.device == torch.device("cuda", 0), f"the device is {pipe.device}"
    assert answer(pipe) == expected
