"""A training step of Gemma 3n needs memory for a piece of the logits; see test_loss_memory."""

from __future__ import annotations

import pytest

from tests.patches.test_gradient_accumulation import gemma3n
from tests.patches.test_loss_memory import TOO_LARGE, check_memory, few_rows, text_model

__all__ = ["few_rows"]  # a fixture


@pytest.mark.regression("gemma3n_loss_memory", TOO_LARGE)
def test_a_model_of_text():
    check_memory(text_model("Gemma3n"))


@pytest.mark.regression("gemma3n_loss_memory", TOO_LARGE)
def test_a_model_of_text_and_images(model_dir):
    check_memory(gemma3n(model_dir))
