"""Models turn queries and keys by their positions in one kernel, with the same bits."""

from __future__ import annotations

import sys

import pytest
import torch

import gemma4_compat
from gemma4_compat.engine.gate import holds
from tests.patches.test_norm_kernels import launched, logits, make

FAMILIES = ("gemma4", "gemma3n", "unified")


@pytest.fixture(autouse=True)
def releases_with_the_patch():
    skip_without_the_patch()


def skip_without_the_patch():
    if not holds("transformers>=5.11"):
        pytest.skip("the patch is for later releases")


def assert_one_kernel(kind):
    skip_without_the_patch()
    modeling = sys.modules[type(make(kind)).__module__]
    queries = torch.randn(1, 1, 8, 256, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 1, 1, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        rotated = lambda: modeling.apply_rotary_pos_emb(queries, cos, sin, unsqueeze_dim=2)  # noqa: E731
        names = launched(rotated)
    assert names == ["rotary"], f"{len(names)} kernels for a rotary embedding"


@pytest.mark.cuda
@pytest.mark.regression("rotary_kernels", r"\d kernels for a rotary embedding")
def test_one_kernel():
    assert_one_kernel("gemma4")


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (3, 600)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits(kind, shape):
    model = make(kind)
    ids = torch.randint(5, 96, shape, device="cuda")
    with gemma4_compat.disabled("rotary_kernels"):
        expected = logits(model, ids)
    assert torch.equal(logits(model, ids), expected)
    names = launched(lambda: logits(model, ids))
    calls = sum(4 + 4 for _ in range(1 + min(3, shape[1])))  # of four layers, queries and keys
    assert names.count("rotary") == calls


@pytest.mark.cuda
def test_a_training_step():
    model, ids = make(), torch.randint(5, 96, (1, 20), device="cuda")
    assert "rotary" not in launched(lambda: model(input_ids=ids, labels=ids).loss.backward())


@pytest.mark.cuda
@pytest.mark.regression("rotary_kernels", r"\d kernels for a rotary embedding")
def test_one_kernel_of_gemma3n():
    assert_one_kernel("gemma3n")


@pytest.mark.cuda
@pytest.mark.regression("rotary_kernels", r"\d kernels for a rotary embedding")
def test_one_kernel_of_unified():
    assert_one_kernel("unified")
