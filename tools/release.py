"""What is about to be published, compared with the checkout that it was built from.

    python tools/release.py DIST DIRECT [VERSION]

The folder DIST holds the sdist and the wheel that was built from it, DIRECT the wheel that was
built from the checkout.

- The first entry of CHANGELOG.md is the version in _version.py, with the day of its release or
  "unreleased"; all entries below have a day.
- The sdist holds every file that git tracks and nothing else; the wheel the package alone.
- Both wheels are the same, file by file.

With VERSION, this is to be published as that release: the version is that one, has a day, and
everything is committed.

Prints what is wrong, and ends with 1 if anything is.
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

ROOT = Path(__file__).parents[1]
UNRELEASED = "unreleased"
ENTRY = re.compile(rf"## (\d+(?:\.\d+)+) \(({UNRELEASED}|\d\d\d\d-\d\d-\d\d)\)")
#: tracked, and in the sdist, but no part of the package
TEMPLATE = "gemma4_compat/patches/offloading/_template.py"
METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def changelog(text: str, version: str, release: str | None = None) -> list[str]:
    """What is wrong with the entries of a changelog for this version of the package."""
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    matches = [ENTRY.fullmatch(line) for line in headings]
    wrong = [line for line, match in zip(headings, matches, strict=True) if match is None]
    problems = [f"{line!r} is neither '## VERSION (YYYY-MM-DD)' nor unreleased" for line in wrong]
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
    problems += [f"{each} is no day" for each in days if not _is_day(each)]
    if sorted(days, reverse=True) != days:
        problems.append("the days do not descend")
    if release is not None and release != version:
        problems.append(f"the package is {version}, not {release}")
    if release is not None and day == UNRELEASED:
        problems.append(f"{first} has no day yet: write it in place of {UNRELEASED!r}")
    return problems


def sdist(path: Path, tracked: set[str]) -> list[str]:
    """What is missing from an sdist, or is too much in it."""
    with tarfile.open(path) as archive:
        found = {m.name.partition("/")[2] for m in archive.getmembers() if not m.isdir()}
    wanted = {name for name in tracked if not name.startswith(".")}
    missing, more = wanted - found, found - tracked - {"PKG-INFO"}
    return [f"{name} is missing" for name in sorted(missing)] + [
        f"{name} is not tracked by git" for name in sorted(more)
    ]


def wheel(path: Path, tracked: set[str], version: str) -> list[str]:
    """What is missing from a wheel, or is too much in it."""
    wanted = {name for name in tracked if name.startswith("gemma4_compat/")} - {TEMPLATE}
    wanted |= {"gemma4_compat/py.typed"}
    wanted |= {f"gemma4_compat-{version}.dist-info/{name}" for name in METADATA}
    found = set(_files(path))
    return [f"{name} is missing" for name in sorted(wanted - found)] + [
        f"{name} is no part of the package" for name in sorted(found - wanted)
    ]


def differences(one: Path, other: Path) -> list[str]:
    """The files in which two wheels differ."""
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
    said = subprocess.run(["git", *arguments, "-z"], cwd=ROOT, capture_output=True, text=True)
    if said.returncode:
        sys.exit(f"a release is checked against a git checkout: {said.stderr.strip()}")
    return [each for each in said.stdout.split("\0") if each]


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
    if release is not None:
        problems += [f"not committed: {each[3:]}" for each in _git("status", "--porcelain")]
    for problem in problems:
        print(problem)
    if not problems:
        what = f"to be released as {release}" if release else "complete"
        print(f"{source.name}, {built.name}: {what}")
        if f"## {version} ({UNRELEASED})" in text:
            print(f"{version} is {UNRELEASED}: before it is published, give it a day, and run")
            print(f"nox -s release-check -- {version}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
