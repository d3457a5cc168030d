"""The data of ``tests/overrides_table.py`` have no bad verdict, and neither has a sample today."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.versions import LIBRARIES, NEWEST, USERS
from tests import overrides_table
from tests.overrides import ROWS
from tests.overrides_table import BAD, VERDICTS, cells_of, judge

STACKS = {"newest": NEWEST, "users": USERS}
#: rows that were wrong once; a minute each, so that only one is not slow
SAMPLE = (
    "generate: subclass, _prepare_cache_for_generation",
    pytest.param(
        "trainer: compute_loss logs num_items_in_batch, the model's loss", marks=pytest.mark.slow
    ),
    pytest.param("save: from four threads at once", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("stack", STACKS)
def test_data(stack):
    """Each row was measured, in all of its cells, on the stack that is tested."""
    entry = overrides_table.read()[stack]
    versions = {name: entry["versions"][name] for name in LIBRARIES}
    assert versions == STACKS[stack]
    assert list(entry["rows"]) == list(ROWS)
    for row, forms in entry["rows"].items():
        assert [(form, action) for form in forms for action in forms[form]] == cells_of(row)
        kinds = {kind for actions in forms.values() for kind in actions.values()}
        assert kinds <= VERDICTS.keys() - set(BAD), row


@pytest.mark.parametrize("row", SAMPLE)
def test_a_sample(row):
    """The verdicts depend on the CPU's kernels, so they may be others than in the data."""
    for form, actions in overrides_table.run([row], jobs=1)[row].items():
        for action, (kind, detail) in actions.items():
            assert kind not in BAD, (form, action, kind, detail)


ONE, TWO = ({"a": torch.tensor([value])} for value in (1.0, 2.0))
STEP = "trainer: compute_loss(**kwargs), super()"
OWN = "trainer: compute_loss: own mean"


@pytest.mark.parametrize(
    ("row", "action", "with_", "without", "reference", "weighted", "kind"),
    [
        (STEP, "step 1", ONE, ONE, ONE, None, "="),
        (STEP, "step 1", ONE, ONE, TWO, None, "="),
        (STEP, "step 1", ONE, TWO, ONE, None, "mended"),
        (STEP, "step 1", ONE, TWO, TWO, None, "WRONG"),
        (STEP, "step 1", ONE, None, ONE, None, "mended"),
        (STEP, "step 1", ONE, None, TWO, None, "WRONG"),
        (STEP, "step 1", ONE, None, None, None, "UNKNOWN"),
        (STEP, "step 1", None, None, ONE, None, "error"),
        (STEP, "step 1", None, ONE, ONE, None, "REFUSED"),
        (STEP, "step 1", None, ONE, None, None, "REFUSED"),
        (STEP, "step 4", ONE, TWO, TWO, ONE, "weighted"),
        (STEP, "step 1", ONE, TWO, TWO, ONE, "WRONG"),
        (OWN, "step 4", ONE, TWO, TWO, ONE, "WRONG"),
    ],
)
def test_verdicts(row, action, with_, without, reference, weighted, kind):
    def result(values):
        return values, None if values is not None else "no", 1

    without = {
        (row, "split", action): result(without),
        (row, "whole", action): result(reference),
        (row, "split", "weighted"): result(weighted),
    }
    cell = row, "split", action
    assert judge(*cell, {cell: result(with_)}, without)[0] == kind


def test_an_override_that_does_not_run():
    cell = "save: max_shard_size=", "whole", "save"
    never, once = ({cell: (ONE, None, reached)} for reached in (0, 1))
    assert judge(*cell, never, once)[0] == "UNREACHED"
    assert judge(*cell, never, never)[0] == "not reached"
    assert judge(*cell, {cell: None}, {})[0] == "CRASH"
