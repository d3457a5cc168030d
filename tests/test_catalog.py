"""The generated documentation is up to date with the patches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gemma4_compat.patches import load
from tools.catalog import render, titles, with_releases
from tools.measured import DATA, Measured

ROOT = Path(__file__).parent.parent


MEASURED = Measured.read(DATA)


@pytest.mark.parametrize("file", ["patches.md", "README.md"])
def test_documentation_is_up_to_date(file):
    stored = (ROOT / file).read_text(encoding="utf-8")
    due = render(load(), MEASURED) if file == "patches.md" else with_releases(stored, MEASURED)
    assert stored == due, "run: nox -s docs"


def test_readme_lists_every_patch_under_its_topic():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed, title = {}, None
    for line in readme.splitlines():
        if heading := re.fullmatch(r"\| \*\*(.+)\*\* \| \|", line):
            title = listed.setdefault(heading[1], [])
        elif title is not None and (row := re.match(r"\|.*\| `(\w+)`[^|]*\|$", line)):
            title.append(row[1])
    assert list(listed) == list(titles())
    for heading, names in titles().items():
        assert sorted(listed[heading]) == names


def test_names_of_patches_are_unique():
    names = [patch.name for patch in load()]
    assert len(names) == len(set(names))
