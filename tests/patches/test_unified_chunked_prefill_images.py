"""Images survive chunked prefill in Gemma 4 unified; see test_chunked_prefill_images."""

from __future__ import annotations

import pytest
import torch

from tests.patches.test_chunked_prefill_images import IGNORED, assert_equal
from tests.patches.test_unified_static_cache_image_mask import generated, model

__all__ = ["model"]  # a fixture


@pytest.mark.regression("unified_chunked_prefill_images", IGNORED)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_an_image(model, cache):
    """A chunk of 7 would end inside the image."""
    expected = generated(model)
    assert not torch.equal(expected, generated(model, image=False))
    for size in (3, 7, 8, 100):
        found = generated(model, prefill_chunk_size=size, cache_implementation=cache)
        assert_equal(found, expected)
