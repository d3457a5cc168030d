"""Gemma 3n divides its loss by ``num_items_in_batch``; see test_gradient_accumulation_loss."""

from __future__ import annotations

import pytest

from tests.patches.test_gradient_accumulation import gemma3n
from tests.patches.test_gradient_accumulation_loss import IGNORED, check


@pytest.mark.regression("gemma3n_accumulation_loss", IGNORED)
def test_loss(model_dir):
    check(gemma3n(model_dir))
