"""``docs/upstream/``: reports for upstream name a patch, and their scripts show the bug."""

from __future__ import annotations

import re
import sys

import pytest

from gemma4_compat.patches import load
from tests.support import run_process
from tests.test_docs import ROOT, blocks, is_newest, text_of

REPORTS = sorted(path.stem for path in (ROOT / "docs" / "upstream").glob("*.md"))
PATCHES = {patch.name: patch for patch in load()}


def page(name):
    return f"docs/upstream/{name}.md"


def of_packed_weights(name):
    """Whether the bug only shows on a CPU on which bitsandbytes repacks 4-bit weights."""
    return name.startswith("cpu_packed_")


@pytest.mark.parametrize("name", REPORTS)
def test_report_is_complete(name):
    text = text_of(page(name))
    assert f"Patch: `{name}`." in text
    assert PATCHES[name].unreported, "link the report in the patch, and delete this page"
    assert text.startswith("# ")
    assert len(text.splitlines()) <= 60
    for part in ("It prints, with transformers ", "**Cause.** ", "**Proposed fix.**\n\n```diff\n"):
        assert part in text
    [script] = blocks(page(name), "python")
    compile(script, page(name), "exec")
    assert "gemma4_compat" not in script


@pytest.mark.slow
@pytest.mark.skipif(not is_newest(), reason="the reports show the newest libraries")
@pytest.mark.parametrize("name", REPORTS)
def test_script_shows_the_bug(name, tmp_path):
    """It prints, and raises, what the report says, without the patches."""
    functional = pytest.importorskip("bitsandbytes.functional")
    if of_packed_weights(name) and not functional.has_avx512bf16():
        pytest.skip("on this CPU nothing is repacked")
    [script], [shown] = blocks(page(name), "python"), blocks(page(name), "text")
    path = tmp_path / "report.py"
    path.write_text(script, encoding="utf-8")
    found = run_process([sys.executable, path], [], tmp_path, HF_HUB_OFFLINE="1")
    raises = re.search(r"^(\w+Error)\b.*\Z", shown, re.MULTILINE | re.DOTALL)
    assert (found.returncode != 0) == bool(raises), found.stderr
    printed = found.stdout + (found.stderr.rstrip().splitlines()[-1] if raises else "")
    assert printed.strip() == shown.strip()


def test_reports_are_of_these_libraries():
    """Each page begins with the project to report to."""
    projects = {re.search(r"^For (\S+)\. ", text_of(page(name)), re.M)[1] for name in REPORTS}
    assert projects <= {
        "huggingface/transformers",
        "huggingface/accelerate",
        "huggingface/peft",
        "bitsandbytes-foundation/bitsandbytes",
    }
