"""An import alone changes no bit of what a GPU computes, but for the patches that are named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.exact import NAMED
from tests.support import run_process

pytestmark = [pytest.mark.cuda, pytest.mark.whole_gpu]

ROOT = Path(__file__).parents[1]
LENGTHS = pytest.mark.parametrize("length", [300, 704, 2048])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By upstream alone, after an import, and after one without the patches of ``NAMED``."""
    folder = tmp_path_factory.mktemp("exact")
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = []
    for name, variables in (
        ("upstream", {"GEMMA4_COMPAT": "0"}),
        ("import", {}),
        ("others", {f"GEMMA4_COMPAT_{name.upper()}": "0" for name in NAMED}),
    ):
        command = [sys.executable, "-m", "tests.exact", folder / "model", folder / name]
        process = run_process(command, path, ROOT, **variables)
        assert process.returncode == 0, process.stderr[-4000:]
        found.append(torch.load(folder / name))
    return found


def differences(found, upstream):
    """The largest difference of each inference case."""
    cases = [name for name in found if torch.is_tensor(found[name])]
    assert len(cases) == 16
    return {
        name: float((found[name] - upstream[name]).abs().max())
        for name in cases
        if not torch.equal(found[name], upstream[name])
    }


def distance(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def test_inference(results):
    upstream, patched, others = results
    assert differences(others, upstream) == {}
    found = differences(patched, upstream)
    if "vision_uint8_pixels" in patched["applied"]:
        assert found.pop("image")
    if "full_attention_memory" in patched["applied"]:
        for length in (17, 64, 300, 577, 1500):
            exact = upstream[f"float64 prompt of {length}"]
            own, theirs = (distance(each[f"prompt of {length}"], exact) for each in results[1::-1])
            print(f"prompt of {length}: errors {own:.5f} and {theirs:.5f}")
            assert 0 < own <= 1.1 * theirs  # of another kernel
        assert not {name for name in found if "static" in name}
    else:
        assert found == {}


@LENGTHS
def test_the_loss_of_a_step(results, length):
    upstream, _, others = (each[f"step {length}"][0] for each in results)
    assert abs(others - upstream) <= 1e-6 * upstream
    assert abs(upstream - results[0][f"float64 {length}"][0]) < 0.05


@LENGTHS
def test_the_gradients_of_a_step(results, length):
    """As near to float64 as upstream's, but for chance."""
    upstream, patched, others = (each[f"step {length}"][1] for each in results)
    exact = results[0][f"float64 {length}"][1]
    theirs, own, of_others = (distance(each, exact) for each in (upstream, patched, others))
    print(f"step {length}: errors {own:.5f}, {of_others:.5f} and {theirs:.5f}")
    assert 0 < theirs < 0.5
    assert own <= 1.02 * theirs
    assert of_others <= 1.02 * theirs
