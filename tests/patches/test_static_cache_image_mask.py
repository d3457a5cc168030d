"""Images give the same logits with a static cache and with a dynamic one.

See test_sliding_cache_layers for the tolerance.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

from gemma4_compat.model.caches import cache_name
from gemma4_compat.tiny import image_inputs, text_inputs
from tests.large_model import large_model
from tests.patches.test_sliding_cache_layers import TOLERANCE, generated
from tests.unified import unified_generated, unified_model

__all__ = ["unified_model"]  # a fixture

VERSION = Version(transformers.__version__)
#: Before transformers 5.23, images cannot be prefilled in chunks.
CHUNKS_WORK = Version("5.23") <= VERSION


def assert_as_dynamic(found, expected):
    worst = (found - expected).abs().max().item()
    assert worst <= TOLERANCE, f"static and dynamic logits differ by up to {worst:.3g}"


@pytest.mark.regression(
    "static_cache_image_mask", r"static and dynamic logits differ", behind="sliding_cache_layers"
)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.skipif(CHUNKS_WORK, reason="the bug is left in chunked prefill alone")
def test_an_image_before_the_bug_was_mended_in_part(model_dir, batch):
    an_image(model_dir, batch)


@pytest.mark.skipif(not CHUNKS_WORK, reason="a regression test above")
@pytest.mark.parametrize("batch", [1, 2])
def test_an_image(model_dir, batch):
    an_image(model_dir, batch)


def an_image(model_dir, batch):
    model = large_model(model_dir)
    expected = generated(model, "image", batch)
    for _ in range(2):  # the cache may be used again
        found = generated(model, "image", batch, cache_implementation="static")
        assert_as_dynamic(found, expected)


@pytest.mark.regression("static_cache_image_mask", r"static and dynamic logits differ")
@pytest.mark.skipif(not CHUNKS_WORK, reason="images are not prefilled in chunks")
def test_prefill_in_chunks(model_dir):
    """The second chunk contains the whole image."""
    model = large_model(model_dir)
    options = {"prefill_chunk_size": 5, "cache_implementation": "static"}
    assert_as_dynamic(generated(model, "image", **options), generated(model, "image"))


def padded(model):
    """Two rows with an image each; the first row is padded on the left."""
    inputs = image_inputs(model.config, batch=2)
    pad = {"input_ids": 0, "attention_mask": 0, "mm_token_type_ids": 0}
    for name, value in pad.items():
        rows = inputs[name]
        first = torch.cat([torch.full((2,), value), rows[0]])
        second = torch.cat([rows[1], rows[1, -2:]])
        inputs[name] = torch.stack([first, second])
    return inputs


def test_a_batch_with_padding(model_dir):
    model = large_model(model_dir)
    found, expected = (
        model.generate(
            **padded(model),
            **options,
            max_new_tokens=8,
            min_new_tokens=8,
            eos_token_id=1,
            output_logits=True,
            return_dict_in_generate=True,
        ).logits
        for options in ({"cache_implementation": "static"}, {})
    )
    assert_as_dynamic(torch.stack(found), torch.stack(expected))


def masks(model, inputs, **options):
    """The attention mask that ``generate`` passes to the first forward."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=32)
    return model.prepare_inputs_for_generation(
        **inputs, is_first_iteration=True, **{cache_name(): cache}, **options
    )["attention_mask"]


def test_text_is_as_ever(model_dir):
    """The mask is made only once, although the inputs have token types."""
    import gemma4_compat

    model = large_model(model_dir)
    made = []
    make = type(model).create_masks_for_generate
    model.create_masks_for_generate = lambda **given: made.append(0) or make(**given)
    masks(model, text_inputs(model.config))
    assert len(made) == 1
    found = generated(model, cache_implementation="static")
    with gemma4_compat.disabled("static_cache_image_mask"):
        expected = generated(model, cache_implementation="static")
    assert torch.equal(found, expected)


def test_small_models_are_as_ever(model_dir):
    import gemma4_compat

    model = large_model(model_dir, use_bidirectional_attention=None)
    found = generated(model, "image", cache_implementation="static")
    with gemma4_compat.disabled("static_cache_image_mask"):
        expected = generated(model, "image", cache_implementation="static")
    assert torch.equal(found, expected)


def test_a_subclass(model_dir):
    from transformers import Gemma4ForConditionalGeneration

    class Mine(Gemma4ForConditionalGeneration):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            return super().prepare_inputs_for_generation(input_ids, **kwargs)

    model = large_model(model_dir, Mine)
    found = generated(model, "image", cache_implementation="static")
    assert_as_dynamic(found, generated(model, "image"))


def test_a_mask_of_the_callers_is_kept(model_dir):
    model = large_model(model_dir)
    inputs = image_inputs(model.config)
    inputs["attention_mask"] = torch.ones(1, 1, 13, 32, dtype=torch.bool)
    assert masks(model, inputs) is inputs["attention_mask"]


@pytest.mark.regression("static_cache_image_mask", r"static and dynamic logits differ")
@pytest.mark.parametrize("size", [None, 4])
def test_an_image_of_unified(unified_model, size):
    if (size is not None) is not CHUNKS_WORK:
        pytest.skip("the bug is left in chunked prefill alone, which images do not survive before")
    options = {} if size is None else {"prefill_chunk_size": size}
    found = unified_generated(unified_model, cache_implementation="static", **options)
    assert_as_dynamic(found, unified_generated(unified_model))


def test_text_of_unified(unified_model):
    found = unified_generated(unified_model, image=False, cache_implementation="static")
    assert_as_dynamic(found, unified_generated(unified_model, image=False))
