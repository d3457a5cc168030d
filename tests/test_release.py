"""The checks of a release."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

import gemma4_compat
from gemma4_compat.patches import load
from tools import release, stamps

ROOT = Path(__file__).parents[1]
DATED = "# Changelog\n\n## 0.2.0 (2026-12-01)\n\nMore.\n\n## 0.1.0 (2026-11-20)\n\nFirst.\n"
TRACKED = {
    ".gitignore",
    ".ci/run",
    "README.md",
    "gemma4_compat/__init__.py",
    "gemma4_compat/py.typed",
    "gemma4_compat/patches/offloading/_template.py",
    "tests/test_all.py",
    "tools/matrix.py",
}


def write_sdist(path, names):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"gemma4_compat-0.1.0/{name}"), io.BytesIO())
    return path


def write_wheel(path, names, content=""):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, content)
    return path


@pytest.fixture
def source(tmp_path):
    """Write an sdist that is correct except for these names."""
    right = TRACKED - {".ci/run"} | {"PKG-INFO"}
    return lambda change=frozenset(): write_sdist(tmp_path / "s.tar.gz", right ^ set(change))


@pytest.fixture
def built(tmp_path):
    """Write a wheel that is correct except for these names."""
    metadata = {f"gemma4_compat-0.1.0.dist-info/{name}" for name in release.METADATA}
    right = {"gemma4_compat/__init__.py", "gemma4_compat/py.typed"} | metadata
    return lambda change=frozenset(): write_wheel(tmp_path / "w.whl", right ^ set(change))


def test_the_changelog_of_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert release.changelog(text, gemma4_compat.__version__) == []


def test_the_changelog_names_every_patch():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not [patch.name for patch in load() if f"`{patch.name}`" not in text]


def test_dated():
    assert release.changelog(DATED, "0.2.0", "0.2.0") == []


def test_unreleased_is_fine_until_it_is_released():
    text = DATED.replace("2026-12-01", "unreleased")
    assert release.changelog(text, "0.2.0") == []
    [problem] = release.changelog(text, "0.2.0", "0.2.0")
    assert problem.startswith("0.2.0 has no date yet")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ((r"## 0.2.0 \(.*\)", "## 0.2.1 (2026-12-01)"), "the first entry is 0.2.1, the package is"),
        ((r"2026-11-20", "unreleased"), "0.1.0 is below 0.2.0 and unreleased"),
        ((r"2026-11-20", "2026-12-24"), "the dates do not descend"),
        ((r"2026-11-20", "2026-11-31"), "2026-11-31 is not a date"),
        ((r"## 0.1.0 ", "## 0.10.0 "), "the versions do not descend"),
        ((r"## 0.1.0 ", "## 0.2.0 "), "the versions do not descend"),
        ((r"## 0.1.0 .*", "## 0.1.0"), "'## 0.1.0' is not"),
        ((r"## .*", ""), "no entry"),
    ],
)
def test_wrong_changelog(change, problem):
    [found] = release.changelog(re.sub(*change, DATED), "0.2.0")
    assert found.startswith(problem)


def test_released_as_another_version():
    assert release.changelog(DATED, "0.2.0", "0.2.1") == ["the package is 0.2.0, not 0.2.1"]


def test_sdist(source):
    assert release.sdist(source(), TRACKED) == []
    for name in ("README.md", "tests/test_all.py"):
        assert release.sdist(source({name}), TRACKED) == [f"{name} is missing"]
    found = release.sdist(source({"tests/notes.txt"}), TRACKED)
    assert found == ["tests/notes.txt is not tracked by git"]


def test_wheel(built):
    assert release.wheel(built(), TRACKED, "0.1.0") == []
    for name in ("gemma4_compat/__init__.py", "gemma4_compat-0.1.0.dist-info/entry_points.txt"):
        assert release.wheel(built({name}), TRACKED, "0.1.0") == [f"{name} is missing"]
    for name in (
        "tests/test_all.py",
        "tools/matrix.py",
        "gemma4_compat/patches/offloading/_template.py",
    ):
        found = release.wheel(built({name}), TRACKED, "0.1.0")
        assert found == [f"{name} is not part of the package"]


def test_wheel_without_its_marker_of_types(built):
    """The marker must be in the wheel even if git does not track it."""
    name = "gemma4_compat/py.typed"
    assert release.wheel(built({name}), TRACKED - {name}, "0.1.0") == [f"{name} is missing"]


def test_wheel_of_another_version(built):
    found = release.wheel(built(), TRACKED, "0.2.0")
    assert "gemma4_compat-0.2.0.dist-info/METADATA is missing" in found


def test_wheels_that_differ(tmp_path):
    one = write_wheel(tmp_path / "1.whl", ["a.py", "b.py"])
    assert release.differences(one, write_wheel(tmp_path / "2.whl", ["b.py", "a.py"])) == []
    assert release.differences(one, write_wheel(tmp_path / "3.whl", ["a.py"])) == ["b.py differs"]
    other = write_wheel(tmp_path / "4.whl", ["a.py", "b.py"], "x = 1")
    assert release.differences(one, other) == ["a.py differs", "b.py differs"]


# -- measured tables ------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path):
    """A checkout with a page of two tables, measured with the code as it is; changes a file."""
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "a.py").write_text('"""Old."""\n\n\ndef f():\n    return "x"  # old\n')
    (tmp_path / "runtime" / "b.cu").write_text("int a;  // old\n")
    (tmp_path / "c.py").write_text("C = 1\n")
    stamped = [stamps.stamp(names, tmp_path) for names in ("runtime", "c.py")]
    rows = "\n\n| a |\n|---|\n| 1 |\n\n"
    (tmp_path / "X.md").write_text(rows.join([*stamped, ""]))

    def change(name, old, new):
        file = tmp_path / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
        return stamps.stale("X.md", tmp_path)

    return change


def test_remarks_do_not_make_a_table_stale(measured):
    assert measured("runtime/a.py", '"""Old."""', '"""New.\n\nMore.\n"""') == []
    assert measured("runtime/a.py", "# old", "# new") == []
    assert measured("runtime/a.py", "def f():\n", 'def f():\n    """New."""\n') == []
    assert measured("runtime/b.cu", "// old", "/* new */ // new") == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("runtime/a.py", '"x"', '"y"'), 3),
        (("runtime/b.cu", "int a", "int b"), 3),
        (("c.py", "C = 1", "C = 2"), 9),
    ],
)
def test_a_table_whose_code_has_changed(measured, change, line):
    assert measured(*change) == [
        f"X.md:{line}: measure this table again, its code has changed since"
    ]


def test_a_table_without_files(measured):
    assert measured("X.md", "files: c.py", "files: d.py") == [
        "X.md:9: the table depends on d.py, which is gone"
    ]
    [first, _] = measured("X.md", "<!-- files: runtime", "<!-- names: runtime")
    assert first == "X.md:3: no comment above this table names its files"


def test_every_table_of_the_benchmarks_names_its_files():
    pages = sorted(path.name for path in ROOT.glob("benchmarks/*.md"))
    found = [each for page in pages for each in stamps.stale(f"benchmarks/{page}")]
    assert not [each for each in found if "measure this table again" not in each]


def test_a_stamp_is_renewed(tmp_path):
    page = tmp_path / "X.md"
    page.write_text(
        "<!-- files: noxfile.py sha256: 1 -->\n\n<!-- files: noxfile.py sha256: 2 -->\n"
    )
    stamps.main(str(page), "3")
    assert page.read_text().splitlines()[::2] == [
        "<!-- files: noxfile.py sha256: 1 -->",
        stamps.stamp("noxfile.py"),
    ]
