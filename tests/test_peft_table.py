"""The tool that compares PEFT on a split model with PEFT on a whole one sees a planted fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import peft_table
from tests.peft_table import differences, verdict

TOOL = Path(peft_table.__file__)
NAN, INF = float("nan"), float("inf")


def cells(row, fault=None):
    """What the tool says of a row, without its table."""
    environment = {**os.environ, "GEMMA4_COMPAT": "1", "OMP_NUM_THREADS": "1"}
    environment |= {} if fault is None else {peft_table.FAULT: fault}
    command = [sys.executable, str(TOOL), "--worker", json.dumps([row])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["cells"]


def test_no_fault():
    assert {kind for kind, _, _ in cells("LORA @ layer").values()} == {"="}


def test_changed_weight():
    found = cells("LORA @ layer", "weight")
    for action in ("create", "forward", "disable", "train", "load", "merge", "unload"):
        assert found[action][0] == "WRONG", action


def test_error_of_the_split_model():
    assert cells("none @ layer", "error")["forward"][0] == "REFUSED"


def test_every_tuner_has_a_row():
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    features = {row.partition(" @ ")[0] for row in peft_table.rows()}
    assert {kind.value for kind in PEFT_TYPE_TO_TUNER_MAPPING} <= features


@pytest.mark.parametrize(
    ("found", "expected", "difference"),
    [
        ([1.0], [1.0], None),
        ([NAN], [NAN], None),
        ([1.0], [1.5], (0.5, "a")),
        ([NAN], [1.0], (INF, "a")),
        ([1.0, 2.0], [1.0], (INF, "a: torch.float32 (2,), torch.float32 (1,)")),
    ],
)
def test_differences(found, expected, difference):
    found, expected = ({"a": torch.tensor(each)} for each in (found, expected))
    assert differences(found, expected) == difference


def test_a_missing_tensor_is_a_difference():
    one = {"a": torch.ones(1)}
    assert differences({}, one) == (INF, "a is missing")
    assert differences(one, {}) == (INF, "a is new")


def test_verdicts():
    one, two = ({"a": torch.tensor([value])} for value in (1.0, 2.0))
    assert verdict((one, None), (one, None)) == ("=", "")
    assert verdict((two, None), (one, None)) == ("WRONG", "1 a")
    assert verdict((None, "no"), (one, None)) == ("REFUSED", "no")
    assert verdict((None, "no"), (None, "never")) == ("error", "never")
    assert verdict((one, None), (None, "never")) == ("split only", "never")
