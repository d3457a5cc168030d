"""The loss of a forward with ``num_items_in_batch`` is the sum divided by that number."""

from __future__ import annotations

import pytest
import torch

from tests.patches.test_gradient_accumulation import by_hand, gemma4, rows

IGNORED = r"the loss ignores num_items_in_batch"


def batch():
    return {name: torch.stack([row[name] for row in rows()]) for name in rows()[0]}


def check(model):
    mean, _ = by_hand(model, rows())
    targets = (batch()["labels"][:, 1:] != -100).sum()
    for number in (targets * 4, int(targets * 4)):
        found = model(**batch(), num_items_in_batch=number)
        as_tuple = model(**batch(), num_items_in_batch=number, return_dict=False)
        assert found.loss.item() == pytest.approx(mean / 4, rel=1e-6), IGNORED
        assert torch.equal(as_tuple[0], found.loss)
        assert torch.equal(as_tuple[1], found.logits)
    plain = model(**batch())
    assert plain.loss.item() == pytest.approx(mean, rel=1e-6)
    assert torch.equal(plain.logits, found.logits)


@pytest.mark.regression("gradient_accumulation_loss", IGNORED)
def test_gemma4(model_dir):
    check(gemma4(model_dir))
