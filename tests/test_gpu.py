"""What ``tools/gpu.py`` writes about a run of the CUDA tests; the run itself needs a GPU."""

from __future__ import annotations

import json
import sys
from datetime import date
from importlib.metadata import version

import pytest

from gemma4_compat.versions import WITH_TORCH
from tools import gpu

CARD = {"card": "NVIDIA H100 80GB HBM3", "capability": "9.0"}
DAY = date(2026, 12, 1)
#: a test that fails after it passed, one that fails, is skipped, and passes with two parameters
TESTS = """
def test_a(request):
    request.addfinalizer(lambda: 1 / 0)

def test_b():
    assert False

@pytest.mark.skip
def test_c():
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_d(number):
    pass
"""


@pytest.fixture
def new():
    for name in WITH_TORCH:
        pytest.importorskip(name)
    return gpu.entry(CARD, {"passed": 3, "failed": 0, "skipped": 2}, DAY)


def test_counts(monkeypatch, tmp_path):
    """Of a real run, which here are other tests."""
    (tmp_path / "test_x.py").write_text(f"import pytest\n{TESTS}")
    monkeypatch.setattr(gpu, "TESTS", (str(tmp_path), "-p", "no:cacheprovider"))
    monkeypatch.setattr(gpu, "MARKS", ("not slow", "slow"))
    (tmp_path / "test_z.py").write_text("import pytest\n@pytest.mark.slow\ndef test_e(): pass\n")
    assert gpu.run(1) == (1, {"passed": 3, "failed": 2, "skipped": 1})
    monkeypatch.setattr(gpu, "TESTS", (str(tmp_path / "test_y.py"),))
    code, _ = gpu.run(1)
    assert code not in gpu.RAN


def test_an_entry(new):
    assert new["transformers"] == version("transformers")
    assert new["date"] == "2026-12-01"
    assert len(new["code"]) == 16


def test_a_run_replaces_the_entry_of_its_versions(new, tmp_path):
    file = tmp_path / "gpu.json"
    assert gpu.read(file) == []
    older, newer = {**new, "transformers": "5.5.0"}, {**new, "transformers": "50.0.0"}
    for each in (older, newer, new, {**new, "passed": 4}):
        gpu.add(each, file)
    assert gpu.read(file) == [newer, {**new, "passed": 4}, older]
    assert file.read_text().count("\n") == 5


def test_in_words(new):
    entries = [{**new, "transformers": "5.24.0"}, {**new, "transformers": "5.5.0", "failed": 1}]
    assert gpu.summary(entries) == (
        "3 passed on an NVIDIA H100 80GB HBM3 with transformers 5.24.0 (2026-12-01); "
        "3 passed, 1 failed on an NVIDIA H100 80GB HBM3 with transformers 5.5.0 (2026-12-01)"
    )


def test_code_that_has_changed(new, tmp_path):
    file = tmp_path / "gpu.json"
    assert gpu.stale(file) == []
    gpu.add(new, file)
    assert gpu.stale(file) == []
    gpu.add({**new, "code": "0"}, file)
    [problem] = gpu.stale(file)
    assert problem.startswith("tests/gpu.json: the code has changed since 2026-12-01")


@pytest.mark.parametrize(("code", "written"), [(0, True), (1, True), (2, False), (5, False)])
def test_a_run_that_ends_early_writes_nothing(code, written, new, monkeypatch, tmp_path, capsys):
    file = tmp_path / "gpu.json"
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "-n", "16", "--out", str(file)])
    monkeypatch.setattr(gpu, "card", lambda: CARD)
    monkeypatch.setattr(gpu, "run", lambda workers: (code, {"passed": workers, "failed": 0}))
    assert gpu.main() == code
    assert file.exists() == written
    if written:
        assert json.loads(file.read_text())[0]["passed"] == 16
        assert "16 passed on an NVIDIA H100" in capsys.readouterr().out


def test_without_a_gpu(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="finds no CUDA GPU"):
        gpu.card()
