"""Decode steps of Gemma 3n compute attention in a kernel of this package."""

from __future__ import annotations

import pytest

from tests.patches.test_cudnn_attention import make
from tests.patches.test_one_token_attention import assert_no_sdpa


@pytest.mark.cuda
@pytest.mark.regression("gemma3n_one_token_attention", r"computes one token: 2 calls")
def test_a_decode_step():
    assert_no_sdpa(make(kind="gemma3n"))
