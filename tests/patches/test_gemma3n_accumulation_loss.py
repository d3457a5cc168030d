"""The loss of Gemma 3n; see test_gradient_accumulation_loss."""

from __future__ import annotations

import pytest

from tests.patches.test_gradient_accumulation import gemma3n
from tests.patches.test_gradient_accumulation_loss import IGNORED, check


@pytest.mark.regression("gemma3n_accumulation_loss", IGNORED)
def test_loss(model_dir):
    check(gemma3n(model_dir))
