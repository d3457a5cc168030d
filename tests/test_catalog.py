"""The generated documentation is that of the patches in the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma4_compat.patches import load
from tools.catalog import render, with_releases
from tools.measured import DATA, Measured

ROOT = Path(__file__).parent.parent


MEASURED = Measured.read(DATA)


@pytest.mark.parametrize("file", ["patches.md", "README.md"])
def test_documentation_is_up_to_date(file):
    stored = (ROOT / file).read_text(encoding="utf-8")
    due = render(load(), MEASURED) if file == "patches.md" else with_releases(stored, MEASURED)
    assert stored == due, "run: nox -s docs"


def test_readme_lists_every_patch():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [patch.name for patch in load() if f"`{patch.name}`" not in readme]
    assert not missing
