"""Gradients of attention of Gemma 4 unified are finite on a GPU."""

from __future__ import annotations

import pytest

from tests.patches.test_cudnn_attention import assert_finite_norm, low_scores


@pytest.mark.cuda
@pytest.mark.regression("unified_cudnn_attention", r"grad_norm is nan")
def test_a_training_step():
    assert_finite_norm(low_scores(kind="unified"))
