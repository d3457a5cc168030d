"""Products of one row of inputs with weights in 4 bits, in Gemma 4 unified."""

from __future__ import annotations

import pytest
import torch

from tests.patches.test_cudnn_attention import make
from tests.patches.test_one_row_4bit import (
    assert_more_exact,
    assert_not_by_bitsandbytes,
    quantized,
)


@pytest.mark.regression("unified_one_row_4bit", r"bitsandbytes multiplies one row")
def test_who_multiplies(monkeypatch):
    model = quantized(make(kind="unified"), dtype=torch.float32, device="cpu")
    assert_not_by_bitsandbytes(model, monkeypatch)


@pytest.mark.cuda
@pytest.mark.regression("unified_one_row_4bit", r"the products are not exact")
def test_forward_of_one_token():
    assert_more_exact(quantized(make(kind="unified")))
