"""Decode steps of Gemma 4 unified compute attention in a kernel of this package."""

from __future__ import annotations

import pytest
import torch

from tests.patches.test_cudnn_attention import make
from tests.patches.test_one_token_attention import assert_no_sdpa, pretend


@pytest.mark.regression("unified_one_token_attention", r"computes one token: 2 calls")
def test_a_decode_step(monkeypatch):
    pretend(monkeypatch)
    assert_no_sdpa(make(kind="unified"))


@pytest.mark.cuda
@pytest.mark.regression("unified_one_token_attention", r"computes one token: 2 calls")
def test_a_decode_step_on_a_gpu():
    assert_no_sdpa(make(kind="unified").to("cuda", torch.bfloat16))
