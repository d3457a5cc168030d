"""The tool that compares PEFT on split and whole models detects planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests import peft_table
from tests.peft_table import differences, forked, judge, verdict

TOOL = Path(peft_table.__file__)
NAN, INF = float("nan"), float("inf")


def cells(row, fault=None):
    """The tool's results for a row, without the table."""
    environment = {**os.environ, "GEMMA4_COMPAT": "1", "OMP_NUM_THREADS": "1"}
    environment |= {} if fault is None else {peft_table.FAULT: fault}
    command = [sys.executable, str(TOOL), "--worker", json.dumps([row])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["cells"]


@pytest.mark.slow
def test_no_fault():
    assert {kind for kind, _, _ in cells("LORA @ layer").values()} == {"="}


@pytest.mark.slow
def test_changed_weight():
    found = cells("LORA @ layer", "weight")
    for action in ("create", "forward", "disable", "train", "load", "merge", "unload"):
        assert found[action][0] == "WRONG", action


@pytest.mark.slow
def test_the_whole_model_is_off():
    """PEFT merges into both ends of a tied model; the split model is correct."""
    found = cells("LORA @ lm_head")
    merged = ("merge", "merge&unload", "save merged")
    assert {found[action][0] for action in merged} == {"whole"}
    assert {kind for action, (kind, _, _) in found.items() if action not in merged} == {"="}


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("split", "whole", "reference", "kind"),
    [
        (1.0, 2.0, 1.0, "whole"),
        (1.0, 2.0, 3.0, "WRONG"),
        (1.0, 2.0, 2.0, "WRONG"),
        (1.0, 2.0, None, "WRONG"),
        (1.0, 1.0, 3.0, "="),
        (1.0, None, 1.0, "whole"),
        (1.0, None, 3.0, "WRONG"),
        (1.0, None, None, "split only"),
        (None, 1.0, 1.0, "REFUSED"),
        (None, None, 1.0, "error"),
    ],
)
def test_verdict_with_a_reference(monkeypatch, split, whole, reference, kind):
    def result(value):
        return (None, "no") if value is None else ({"a": torch.tensor([value])}, None)

    def expected(row):
        if reference is None:
            raise ValueError("no reference")
        return result(reference)[0]

    monkeypatch.setitem(peft_table.REFERENCES, "act", expected)
    assert judge(None, "act", result(split), result(whole))[0] == kind
    assert judge(None, "other", result(split), result(whole))[0] != "whole"


def test_threads_of_a_forked_process():
    """Several threads at once start torch's thread pool, which only one thread may do."""
    numbers = torch.randn(300_000)
    torch.add(numbers, 1)

    def work():
        errors, barrier = [], threading.Barrier(16)

        def add():
            barrier.wait()
            try:
                torch.add(numbers, 1)
            except RuntimeError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=add) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert [forked(work) for _ in range(30)] == [[]] * 30
    finally:
        sys.setswitchinterval(interval)


def test_verdicts():
    one, two = ({"a": torch.tensor([value])} for value in (1.0, 2.0))
    assert verdict((one, None), (one, None)) == ("=", "")
    assert verdict((two, None), (one, None)) == ("WRONG", "1 a")
    assert verdict((None, "no"), (one, None)) == ("REFUSED", "no")
    assert verdict((None, "no"), (None, "never")) == ("error", "never")
    assert verdict((one, None), (None, "never")) == ("split only", "never")
