"""A QAT checkpoint in Google's own format is saved, and loads again."""

from __future__ import annotations

import pytest
import torch

from tests.support import assert_same, logits, save_qat

pytest.importorskip("transformers.integrations.gemma_quant")


def load(folder):
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.mark.regression("gemma_quant_save", r"'bool' object is not callable")
def test_save_and_load(model_dir, tmp_path):
    model = load(save_qat(model_dir, tmp_path / "in"))
    model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    assert {p.dtype for p in again.parameters()} == {p.dtype for p in model.parameters()}
    assert_same(logits(again), logits(model))
