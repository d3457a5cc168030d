"""Gemma 4 unified computes its RMS norms in one kernel each."""

from __future__ import annotations

import pytest

from tests.patches.test_norm_kernels import assert_one_kernel


@pytest.mark.cuda
@pytest.mark.regression("unified_norm_kernels", r"\d kernels for a norm")
def test_one_kernel():
    assert_one_kernel("unified")
