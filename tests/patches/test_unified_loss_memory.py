"""A step of Gemma 4 unified needs memory for a piece of the logits; see test_loss_memory."""

from __future__ import annotations

import pytest

from tests.patches.test_loss_memory import TOO_LARGE, check_memory, few_rows
from tests.patches.test_unified_static_cache_image_mask import model

__all__ = ["few_rows", "model"]  # fixtures


@pytest.mark.regression("unified_loss_memory", TOO_LARGE)
def test_a_model_of_text_and_images(model):
    check_memory(model)
