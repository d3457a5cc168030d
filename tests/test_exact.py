"""An import alone changes no bit of what a GPU computes, and no training step for the worse."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.support import run_process

pytestmark = [pytest.mark.cuda, pytest.mark.xdist_group("exact")]

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What upstream computes, and what it computes after an import of this package."""
    folder = tmp_path_factory.mktemp("exact")
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = []
    for name, variables in (("upstream", {"GEMMA4_COMPAT": "0"}), ("import", {})):
        command = [sys.executable, "-m", "tests.exact", folder / "model", folder / name]
        process = run_process(command, path, ROOT, **variables)
        assert process.returncode == 0, process.stderr[-4000:]
        found.append(torch.load(folder / name))
    return found


def test_inference(results):
    upstream, patched = results
    cases = [name for name, value in upstream.items() if torch.is_tensor(value)]
    assert len(cases) == 16
    differences = {
        name: float((patched[name] - upstream[name]).abs().max())
        for name in cases
        if not torch.equal(patched[name], upstream[name])
    }
    assert differences == {}


@pytest.mark.parametrize("length", [300, 704, 2048])
def test_a_training_step(results, length):
    """The loss within 1e-6; gradients as near to float64 as upstream's, but for chance."""
    upstream, patched = results
    exact = upstream[f"float64 {length}"]
    (theirs, their_gradients), (own, own_gradients) = (
        each[f"step {length}"] for each in (upstream, patched)
    )
    assert abs(own - theirs) <= 1e-6 * abs(theirs)
    size = exact[1].norm()
    error, their_error = ((g - exact[1]).norm() / size for g in (own_gradients, their_gradients))
    print(f"{length}: loss {own:.8f} and {theirs:.8f}; errors {error:.5f} and {their_error:.5f}")
    assert abs(theirs - exact[0]) < 0.05
    assert 0 < error <= 1.02 * their_error
