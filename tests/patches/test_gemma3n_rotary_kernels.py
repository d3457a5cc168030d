"""Gemma 3n turns queries and keys in one kernel each."""

from __future__ import annotations

import pytest

from tests.patches.test_rotary_kernels import assert_one_kernel


@pytest.mark.cuda
@pytest.mark.regression("gemma3n_rotary_kernels", r"\d kernels for a rotary embedding")
def test_one_kernel():
    assert_one_kernel("gemma3n")
