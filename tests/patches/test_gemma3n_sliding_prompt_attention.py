"""Sliding layers of Gemma 3n compute a long prompt in parts."""

from __future__ import annotations

import pytest
import torch

from tests.patches.test_cudnn_attention import make
from tests.patches.test_sliding_prompt_attention import WINDOW, assert_in_parts, pretend


@pytest.mark.regression("gemma3n_sliding_prompt_attention", r"reads 71 keys at once")
def test_a_long_prompt(monkeypatch):
    pretend(monkeypatch)
    assert_in_parts(make(kind="gemma3n"), 71)


@pytest.mark.cuda
@pytest.mark.regression("gemma3n_sliding_prompt_attention", r"reads 4096 keys at once")
def test_a_long_prompt_on_a_gpu():
    assert_in_parts(make(kind="gemma3n", window=WINDOW).to("cuda", torch.bfloat16))
