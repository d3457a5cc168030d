"""The generated documentation is that of the patches in the tree."""

from __future__ import annotations

from pathlib import Path

from gemma4_compat.catalog import render
from gemma4_compat.patches import load

ROOT = Path(__file__).parent.parent


def test_patches_md_is_up_to_date():
    stored = (ROOT / "patches.md").read_text(encoding="utf-8")
    assert stored == render(load()), "run: python -m gemma4_compat.catalog patches.md"


def test_readme_lists_every_patch():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [patch.name for patch in load() if f"`{patch.name}`" not in readme]
    assert not missing
