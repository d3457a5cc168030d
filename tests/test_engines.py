"""The data of ``tests/engines.py`` have no bad verdict, and neither has a sample today."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.versions import LIBRARIES, NEWEST, USERS
from tests import engines
from tests.engines import (
    SAMPLE,
    SIDES,
    VERDICTS,
    WHOLE,
    check,
    judge,
)

STACKS = {"newest": NEWEST, "users": USERS}
#: by engine: what is an error of the libraries that says what to do
KNOWN_ERRORS = {
    "torchrun, tp_plan": {"forward"},
    "accelerate launch, Accelerator, DDP": {"tower trained", "tower unused"},
}
#: DeepSpeed's error for offloaded weights, and its weight decay
KNOWN_WITH_DEEPSPEED = {(engines.HOST, "step"): "error"} | {
    (form, "tower unused"): "decayed" for form in engines.FORMS
}
#: what fails before the steps: Trainer reads the optimizer from "cpu:0"
KNOWN_ERRORS_OF_USERS = {"torchrun, Trainer, DDP": {"resume"}}


@pytest.mark.parametrize("stack", STACKS)
def test_data(stack):
    """Each cell was measured on the stack that is tested; with the patches, all are equal."""
    entry = engines.read()[stack]
    assert {name: entry["versions"][name] for name in LIBRARIES} == STACKS[stack]
    rows = entry["rows"]
    found = [(e, form, each) for e, forms in rows.items() for form in forms for each in forms[form]]
    assert found == list(engines.cells())
    for engine, form, action in found:
        sides = rows[engine][form][action]
        assert sides.keys() == SIDES.keys()
        assert set(sides.values()) <= VERDICTS.keys()
        known = KNOWN_ERRORS.get(engine, set())
        if stack == "users":
            known = known | KNOWN_ERRORS_OF_USERS.get(engine, set())
        wanted = {"="} | ({"error"} if action in known else set())
        if "DeepSpeed" in engine:
            wanted = {KNOWN_WITH_DEEPSPEED.get((form, action), "=")}
        assert sides["with"] in wanted, (engine, form, action, sides)


def test_page():
    assert engines.PAGE.read_text() == engines.page()


@pytest.mark.parametrize(
    "name", [pytest.param(" | ".join(each), marks=pytest.mark.plays(*each)) for each in SAMPLE]
)
def test_a_sample(name, cell):
    check(cell)


@pytest.mark.slow
def test_cells_with_processes_of_their_own():
    """As on GPUs."""
    cell, found = ("torchrun, fully_shard", WHOLE, "step"), []
    engines.run_apart([cell], {"now": {}}, 1, 300, 60, lambda *each: found.append(each[:3]))
    assert found == [(cell, "now", "=")]


def values(number, part=None):
    return {"loss 0": torch.tensor(number), "lora": torch.tensor([3.0, 1.0])}, part


@pytest.mark.parametrize(
    ("results", "kind"),
    [
        ([values(1.0), values(1.0)], "="),
        ([values(1.0), values(1.0 + 1e-6)], "="),
        ([values(1.0), values(1.0 + 1e-4)], "WRONG"),
        ([values(1.0), values(float("nan"))], "WRONG"),
        ([values(1.0, 0.5), values(1.0, 0.54)], "="),
        ([values(1.0, 0.5), values(1.0, 0.6)], "replicated"),
        ([values(1.0), "HANG"], "HANG"),
        (["RuntimeError: gloo: Connection reset", engines.DIED], "HANG"),
        (["HANG", "ValueError: no"], "error"),
        (["ValueError: gemma4_compat: no", "RuntimeError: gloo"], "refused"),
    ],
)
def test_verdicts(results, kind):
    assert judge(results, values(1.0))[0] == kind


def test_a_verdict_in_bfloat16():
    far = [values(1.0), values(1.0 + 4e-3)]
    assert judge(far, values(1.0))[0] == "WRONG"
    assert judge(far, values(1.0), "bf16")[0] == "="
    assert judge([values(1.0), values(1.02)], values(1.0), "bf16")[0] == "WRONG"


def test_a_verdict_without_a_reference():
    assert judge([values(1.0), values(1.0)], "ValueError: no")[0] == "WRONG"
    new = {"lora": torch.ones(1), "another": torch.ones(1)}
    assert judge([(new, None)], ({"lora": torch.ones(1)}, None))[0] == "WRONG"
