"""Images and sound survive chunked prefill.

Chunks add the same numbers in another order.  See test_sliding_cache_layers for the tolerance; text
alone, which needs no patch, is tested with the same one.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from gemma4_compat.tiny import audio_inputs, image_inputs, text_inputs
from tests.large_model import large_model
from tests.patches.test_gradient_accumulation import gemma3n
from tests.patches.test_sliding_cache_layers import TOLERANCE
from tests.support import load_model, split
from tests.unified import unified_generated, unified_model

__all__ = ["unified_model"]  # a fixture

IGNORED = r"logits differ by up to|cannot split the raw multimodal inputs"
TOKENS = 6
#: the inputs that have a value for each token
TEXT = ("input_ids", "attention_mask", "mm_token_type_ids")


def together(*parts):
    """One prompt with these inputs, one after the other."""
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        joined[name] = torch.cat(values, dim=1 if name in TEXT else 0)
    joined["attention_mask"] = torch.ones_like(joined["input_ids"])
    return joined


def two_images(config):
    first, second = image_inputs(config), image_inputs(config)
    second["pixel_values"] = 1 - second["pixel_values"]
    return together(first, text_inputs(config), second)


def sound_between_images(config):
    return together(image_inputs(config), audio_inputs(config), image_inputs(config))


def two_rows(config):
    """The image of the second row is four tokens later."""
    first, second = image_inputs(config), image_inputs(config)
    second["pixel_values"] = 1 - second["pixel_values"]
    words = {name: value[:, 1:5] for name, value in text_inputs(config).items()}
    rows = together(first, words), together(words, second)
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def padded(config):
    """The first row is padded on the left."""
    inputs = two_rows(config)
    inputs["attention_mask"][0, :2] = 0
    inputs["input_ids"][0, :2] = 0
    return inputs


def video(config):
    """Two frames, between text."""
    inputs = image_inputs(config)
    frames = together(inputs, inputs)
    ids = frames["input_ids"]
    frames["input_ids"] = torch.where(ids == config.image_token_id, config.video_token_id, ids)
    frames["mm_token_type_ids"] = frames["mm_token_type_ids"] * 2
    pixels, positions = frames.pop("pixel_values"), frames.pop("image_position_ids")
    return {**frames, **as_video(pixels, positions)}


def as_video(pixels, positions):
    """Later releases take the frames of all videos along a single axis."""
    forward = transformers.Gemma4ForConditionalGeneration.forward
    parameters = inspect.signature(forward).parameters
    if "num_frames_per_video" in parameters:
        number = torch.tensor([len(pixels)])
        return {
            "pixel_values_videos": pixels,
            "video_position_ids": positions,
            "num_frames_per_video": number,
        }
    return {"pixel_values_videos": pixels[None], "video_position_ids": positions[None]}


def generated(model, inputs, **options):
    """The logits of each new token."""
    return torch.stack(
        model.generate(
            **inputs,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            eos_token_id=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        ).logits
    )


def assert_equal(found, expected, tolerance=TOLERANCE):
    worst = (found - expected).abs().max().item()
    assert worst <= tolerance, f"logits differ by up to {worst:.3g}"


def small_model(model_dir):
    return large_model(
        model_dir,
        num_kv_shared_layers=2,
        use_bidirectional_attention=None,
        hidden_size_per_layer_input=256,
    )


MODELS = {"small": small_model, "large": large_model}
PROMPTS = [image_inputs, two_images, two_rows, padded]
if transformers.__version__ != "5.15.0":  # whose model raises for a video: 'tuple' object ...
    PROMPTS.append(video)
#: in PROMPTS, inside and outside of an image; shorter than an image; the whole prompt
SIZES = [3, 7, 9, 100]
#: Later releases prefill images in chunks, if no image is divided.
IMAGES_WORK = Version(transformers.__version__) >= Version("5.23")
BUG = pytest.mark.regression("chunked_prefill_images", IGNORED)


def check(model, inputs, **options):
    expected = generated(model, inputs)
    text = {name: inputs[name] for name in TEXT}
    assert not torch.equal(generated(model, text), expected), "the input makes no difference"
    for size in SIZES:
        assert_equal(generated(model, inputs, prefill_chunk_size=size, **options), expected)


@pytest.mark.parametrize("model", MODELS)
def test_text(model_dir, model):
    model = MODELS[model](model_dir)
    inputs = text_inputs(model.config)
    expected = generated(model, inputs)
    for size in SIZES:
        assert_equal(generated(model, inputs, prefill_chunk_size=size), expected)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.skipif(IMAGES_WORK, reason="the bug is not in small models any more")
@BUG
def test_images_of_a_small_model(model_dir, prompt):
    model = small_model(model_dir)
    check(model, prompt(model.config))


@pytest.mark.parametrize("prompt", PROMPTS)
@BUG
def test_images_of_a_large_model(model_dir, prompt):
    """Image tokens attend to each other, so no chunk may end inside an image."""
    model = large_model(model_dir)
    check(model, prompt(model.config))


@pytest.mark.parametrize("prompt", [audio_inputs, sound_between_images])
@pytest.mark.parametrize("model", MODELS)
@BUG
def test_sound(model_dir, model, prompt):
    model = MODELS[model](model_dir)
    check(model, prompt(model.config))


@pytest.mark.parametrize("model", MODELS)
def test_static_cache(model_dir, model):
    model = MODELS[model](model_dir)
    check(model, sound_between_images(model.config), cache_implementation="static")


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_split_model(model_dir, tmp_path, kind):
    """Chunks round differently in bfloat16, so the logits are those of the whole model."""
    whole, model = load_model(model_dir, kind), load_model(model_dir, kind)
    model = split(model, tmp_path)
    inputs = sound_between_images(model.config)
    for size in SIZES:
        found, expected = (
            generated(each, inputs, prefill_chunk_size=size) for each in (model, whole)
        )
        assert torch.equal(found, expected)
    # One chunk computes what no chunks compute.
    assert torch.equal(found, generated(whole, inputs))


def test_a_conversation(model_dir):
    """The second turn has an image; the first one is in the cache."""
    from transformers import DynamicCache

    model = small_model(model_dir)
    first = image_inputs(model.config)
    both = together(first, text_inputs(model.config), first)
    second = {**both, **{name: first[name] for name in ("pixel_values", "image_position_ids")}}
    found = []
    for options in ({}, {"prefill_chunk_size": 7}):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(**first, past_key_values=cache)
        found.append(generated(model, second, past_key_values=cache, **options))
    assert_equal(found[1], found[0])


def test_beams(model_dir):
    model = small_model(model_dir)
    inputs = sound_between_images(model.config)
    options = {"num_beams": 2, "max_new_tokens": 6, "min_new_tokens": 6, "eos_token_id": 1}
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, prefill_chunk_size=7), expected)


def test_too_few_images(model_dir):
    model = small_model(model_dir)
    inputs = two_images(model.config)
    for name in ("pixel_values", "image_position_ids"):
        inputs[name] = inputs[name][:1]
    with pytest.raises(ValueError, match=r"image.* tokens: 8, features: ?4"):
        generated(model, inputs, prefill_chunk_size=7)


def test_given_objects_are_as_before(model_dir):
    model = small_model(model_dir)
    inputs = sound_between_images(model.config)
    before, options = dict(inputs), model.generation_config.to_dict()
    generated(model, inputs, prefill_chunk_size=7)
    assert inputs.keys() == before.keys()
    assert all(inputs[name] is before[name] for name in before)
    assert model.generation_config.to_dict() == options


@pytest.mark.parametrize("of", ["the class", "the model"])
def test_a_method_of_a_user_that_changes_the_features(model_dir, of):
    """The chunks get what the user's method returns; it does not run again for each."""
    model = small_model(model_dir)
    inputs = image_inputs(model.config)
    usual = model.model.get_image_features

    def own(pixel_values, image_position_ids=None, **kwargs):
        output = usual(pixel_values, image_position_ids, **kwargs)
        features = output.pooler_output
        in_one = isinstance(features, torch.Tensor)
        output.pooler_output = 0.5 * features if in_one else tuple(0.5 * each for each in features)
        return output

    class Own(type(model.model)):
        get_image_features = staticmethod(own)

    if of == "the class":
        model.model.__class__ = Own
    else:
        model.model.get_image_features = own
    before = dict(vars(model.model))
    expected = generated(model, inputs)
    assert_equal(generated(model, inputs, prefill_chunk_size=7), expected)
    assert vars(model.model) == before


@pytest.mark.skipif(not IMAGES_WORK, reason="these releases pass the images to the forward")
def test_a_hook_sees_what_it_sees_without_chunks(model_dir):
    """A hook that changes the pixels does not get features in their place."""
    model = small_model(model_dir)
    inputs = image_inputs(model.config)

    def darker(module, args, kwargs):
        if kwargs.get("pixel_values") is not None:
            kwargs["pixel_values"] = kwargs["pixel_values"] * 0.5
        return args, kwargs

    model.model.register_forward_pre_hook(darker, with_kwargs=True)
    expected = generated(model, inputs)
    assert_equal(generated(model, inputs, prefill_chunk_size=7), expected)


IMAGE, AUDIO = 500, 510


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)

    def forward(self, pixel_values, **kwargs):
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(last_hidden_state=self.patches(pixel_values))


def gemma3n_with_tower(model_dir):
    model = gemma3n(model_dir).eval()
    config = model.config
    config.image_token_id, config.audio_token_id = IMAGE, AUDIO
    config.vision_soft_tokens_per_image, config.audio_soft_tokens_per_image = 4, 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.model.vision_tower = Tower(config.vision_config.hidden_size)
    return model


def gemma3n_prompt(token):
    ids = torch.tensor([[2, 7, 8, *[token] * 4, 9, 10, 11, *[token] * 4, 12, 13]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.regression("chunked_prefill_images", IGNORED)
def test_two_images_of_gemma3n(model_dir):
    model = gemma3n_with_tower(model_dir)
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    inputs = {**gemma3n_prompt(IMAGE), "pixel_values": pixels}
    expected = generated(model, inputs)
    other = {**inputs, "pixel_values": pixels.flip(0)}
    assert not torch.equal(generated(model, other), expected)
    for size in (5, 8, 100):
        assert_equal(generated(model, inputs, prefill_chunk_size=size), expected)


def test_sound_of_gemma3n_is_refused(model_dir):
    model = gemma3n_with_tower(model_dir)
    bins = model.config.audio_config.input_feat_size
    inputs = {
        **gemma3n_prompt(AUDIO),
        "input_features": torch.randn(2, 32, bins, generator=torch.Generator().manual_seed(1)),
        "input_features_mask": torch.ones(2, 32, dtype=torch.bool),
    }
    expected = generated(model, inputs)
    with pytest.raises(ValueError, match="Chunked prefill cannot split"):
        generated(model, inputs, prefill_chunk_size=5)
    assert_equal(generated(model, inputs, prefill_chunk_size=100), expected)


@pytest.mark.regression("chunked_prefill_images", IGNORED)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_an_image_of_unified(unified_model, cache):
    """A chunk of 7 would end inside the image."""
    expected = unified_generated(unified_model)
    assert not torch.equal(expected, unified_generated(unified_model, image=False))
    for size in (3, 7, 8, 100):
        found = unified_generated(
            unified_model, prefill_chunk_size=size, cache_implementation=cache
        )
        assert_equal(found, expected)
