"""The generated documentation is up to date with the patches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gemma4_compat.patches import load
from tools.catalog import not_patched, pages, render, render_errors, titles, with_releases
from tools.measured import DATA, Measured

ROOT = Path(__file__).parent.parent


MEASURED = Measured.read(DATA)


@pytest.mark.parametrize("file", ["patches.md", "docs/errors.md", "README.md"])
def test_documentation_is_up_to_date(file):
    pytest.importorskip("tomllib")
    stored = (ROOT / file).read_text(encoding="utf-8")
    due = {
        "patches.md": render(load(), MEASURED),
        "docs/errors.md": render_errors(),
        "README.md": with_releases(stored, MEASURED),
    }
    assert stored == due[file], "run: nox -s docs"


def test_pages_of_errors_are_up_to_date():
    folder = ROOT / "docs" / "errors"
    stored = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    assert stored == pages(MEASURED), "run: nox -s docs"
    for link in re.findall(r"\((errors/.*?)\)", render_errors()):
        assert (ROOT / "docs" / link).exists()


def test_the_page_of_errors_lists_every_patch_once_under_its_topic():
    listed = {}
    for line in (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            names = listed.setdefault(line[3:], [])
        elif row := re.match(
            r"\|.*\| \[`(\w+)`\]\((?:\.\./patches\.md#\1|errors/\1\.md)\) \|$", line
        ):
            names.append(row[1])
    assert listed.pop("Errors that are no bugs") == []
    assert listed == titles()


def test_not_patched():
    """Each entry says what, why and where upstream, in one line of a table."""
    pytest.importorskip("tomllib")
    entries = not_patched()
    assert entries
    for entry in entries:
        assert list(entry) == ["what", "why", "link"]
        assert all(text.strip() and "\n" not in text and "|" not in text for text in entry.values())
        assert entry["link"] == "none known" or re.fullmatch(r"https://\S+", entry["link"])
    assert len({entry["what"] for entry in entries}) == len(entries)


def test_names_of_patches_are_unique():
    names = [patch.name for patch in load()]
    assert len(names) == len(set(names))
