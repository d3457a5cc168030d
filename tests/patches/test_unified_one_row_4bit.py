"""Products of one row of inputs with weights in 4 bits, in Gemma 4 unified."""

from __future__ import annotations

import pytest

from tests.patches.test_cudnn_attention import make
from tests.patches.test_one_row_4bit import assert_more_exact, quantized


@pytest.mark.cuda
@pytest.mark.regression("unified_one_row_4bit", r"the products are not exact")
def test_forward_of_one_token():
    assert_more_exact(quantized(make(kind="unified")))
