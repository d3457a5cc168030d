"""Checks sdist and wheel before a release, against the checkout that they were built from.

    python tools/release.py DIST DIRECT [VERSION]

The folder DIST holds the sdist and the wheel that was built from it, DIRECT the wheel that was
built from the checkout.

- The first entry of CHANGELOG.md is the version in _version.py, with the date of its release or
  "unreleased"; all entries below have a date.
- The sdist holds every file that git tracks and nothing else; the wheel holds only the package.
- Both wheels have the same files with the same content.
- The tables in benchmarks/*.md were measured with the code of the checkout (tools/stamps.py), and
  the CUDA tests that tests/gpu.json counts ran on it (tools/gpu.py).

With VERSION, the files are to be published as that release: the package has that version, its entry
has a date, and everything is committed.

Prints each problem, and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from datetime import date
from pathlib import Path

from packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import gpu, stamps

ROOT = Path(__file__).parents[1]
UNRELEASED = "unreleased"
ENTRY = re.compile(rf"## (\d+(?:\.\d+)+) \(({UNRELEASED}|\d\d\d\d-\d\d-\d\d)\)")
#: tracked by git and in the sdist, but not in the wheel
TEMPLATE = "gemma4_compat/patches/offloading/_template.py"
METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def changelog(text: str, version: str, release: str | None = None) -> list[str]:
    """The problems of a changelog's entries for this version of the package."""
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    matches = [ENTRY.fullmatch(line) for line in headings]
    wrong = [line for line, match in zip(headings, matches, strict=True) if match is None]
    problems = [f"{line!r} is not '## VERSION (YYYY-MM-DD or unreleased)'" for line in wrong]
    entries = [match.groups() for match in matches if match is not None]
    if not entries:
        return [*problems, "no entry"]
    first, day = entries[0]
    if first != version:
        problems.append(f"the first entry is {first}, the package is {version}")
    problems += [
        f"{old} is below {first} and unreleased" for old, d in entries[1:] if d == UNRELEASED
    ]
    versions = [Version(each) for each, _ in entries]
    if sorted(set(versions), reverse=True) != versions:
        problems.append("the versions do not descend")
    days = [each for _, each in entries if each != UNRELEASED]
    problems += [f"{each} is not a date" for each in days if not _is_day(each)]
    if sorted(days, reverse=True) != days:
        problems.append("the dates do not descend")
    if release is not None and release != version:
        problems.append(f"the package is {version}, not {release}")
    if release is not None and day == UNRELEASED:
        problems.append(f"{first} has no date yet: write it in place of {UNRELEASED!r}")
    return problems


def sdist(path: Path, tracked: set[str]) -> list[str]:
    """The files that an sdist lacks, or should not have."""
    with tarfile.open(path) as archive:
        packed = {m.name.partition("/")[2] for m in archive.getmembers() if not m.isdir()}
    wanted = {name for name in tracked if not name.startswith(".")}
    missing, more = wanted - packed, packed - tracked - {"PKG-INFO"}
    return [f"{name} is missing" for name in sorted(missing)] + [
        f"{name} is not tracked by git" for name in sorted(more)
    ]


def wheel(path: Path, tracked: set[str], version: str) -> list[str]:
    """The files that a wheel lacks, or should not have."""
    wanted = {name for name in tracked if name.startswith("gemma4_compat/")} - {TEMPLATE}
    wanted |= {"gemma4_compat/py.typed"}
    wanted |= {f"gemma4_compat-{version}.dist-info/{name}" for name in METADATA}
    packed = set(_files(path))
    return [f"{name} is missing" for name in sorted(wanted - packed)] + [
        f"{name} is not part of the package" for name in sorted(packed - wanted)
    ]


def differences(one: Path, other: Path) -> list[str]:
    """The files that differ between two wheels."""
    first, second = _files(one), _files(other)
    names = sorted(first.keys() | second.keys())
    return [f"{name} differs" for name in names if first.get(name) != second.get(name)]


def _files(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def _git(*arguments: str) -> list[str]:
    git = subprocess.run(["git", *arguments, "-z"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        sys.exit(f"git failed, and a release is checked in a git checkout: {git.stderr.strip()}")
    return [each for each in git.stdout.split("\0") if each]


def main(dist: str, direct: str, release: str | None = None) -> int:
    tracked = set(_git("ls-files"))
    [source], [built] = Path(dist).glob("*.tar.gz"), Path(dist).glob("*.whl")
    [other] = Path(direct).glob("*.whl")
    code = (ROOT / "gemma4_compat" / "_version.py").read_text(encoding="utf-8")
    version = code.split('"')[1]
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    problems = [f"CHANGELOG.md: {each}" for each in changelog(text, version, release)]
    problems += [f"{source.name}: {each}" for each in sdist(source, tracked)]
    problems += [f"{built.name}: {each}" for each in wheel(built, tracked, version)]
    problems += [f"built from the checkout: {each}" for each in differences(built, other)]
    for page in sorted((ROOT / "benchmarks").glob("*.md")):
        problems += stamps.stale(f"benchmarks/{page.name}")
    problems += gpu.stale()
    if release is not None:
        problems += [f"not committed: {each[3:]}" for each in _git("status", "--porcelain")]
    for problem in problems:
        print(problem)
    if not problems:
        what = f"to be released as {release}" if release else "complete"
        print(f"{source.name}, {built.name}: {what}")
        if f"## {version} ({UNRELEASED})" in text:
            print(f"{version} is {UNRELEASED}: before publishing it, give it a date and run")
            print(f"nox -s release-check -- {version}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
