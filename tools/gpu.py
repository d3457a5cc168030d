"""Runs the CUDA tests on this machine's GPU, and writes what came out into ``tests/gpu.json``.

    python tools/gpu.py [-n WORKERS] [--out FILE]

Runs them with the libraries of this Python, on the first GPU or that of ``CUDA_VISIBLE_DEVICES``.
The file is a list with an entry for each set of versions: the card, the counts of tests, the date,
and the hash of the package's code (``tools/stamps.py``).  A run replaces the entry of its versions
in FILE.  A run that ends early writes nothing.

Afterwards, ``python tools/catalog.py README.md`` writes the result into the README.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from packaging.version import Version  # noqa: E402

from gemma4_compat.versions import WITH_TORCH  # noqa: E402
from tools import stamps  # noqa: E402

FILE = ROOT / "tests" / "gpu.json"
#: What the hash is of.
CODE = "gemma4_compat"
TESTS = ("tests", "--sample", "1")
#: One run for each; the tests of the second take most of the memory, so nothing runs beside them.
MARKS = ("cuda and not slow and not whole_gpu", "cuda and not slow and whole_gpu")
#: The exit codes of pytest after all tests have run.
RAN = (0, 1)

Entry = dict[str, Any]


def counts(report: str) -> dict[str, int]:
    """How many tests passed, failed and were skipped, by a report of pytest in XML."""
    outcomes: dict[tuple[str | None, str | None], str] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        test, found = (case.get("classname"), case.get("name")), {each.tag for each in case}
        if found & {"failure", "error"}:  # a failed teardown is a second element of its test
            outcomes[test] = "failed"
        else:
            outcomes.setdefault(test, "skipped" if "skipped" in found else "passed")
    kinds = [*outcomes.values()]
    return {kind: kinds.count(kind) for kind in ("passed", "failed", "skipped")}


def entry(card: Mapping[str, str], found: Mapping[str, int], day: date) -> Entry:
    """What a run with the installed libraries writes."""
    versions = {name: metadata.version(name) for name in WITH_TORCH}
    code = stamps.sha(stamps.sources(CODE))
    return {**card, **versions, "date": day.isoformat(), **found, "code": code}


def add(new: Entry, file: Path) -> None:
    """Write an entry in place of the one of the same versions; the newest versions come first."""
    others = [each for each in read(file) if any(each[name] != new[name] for name in WITH_TORCH)]
    entries = sorted([*others, new], key=_versions, reverse=True)
    lines = ",\n".join(json.dumps(each) for each in entries)
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8", newline="\n")


def _versions(of: Entry) -> list[Version]:
    return [Version(of[name]) for name in ("transformers", *WITH_TORCH)]


def read(file: Path = FILE) -> list[Entry]:
    """The entries of a file; none if it does not exist."""
    if not file.exists():
        return []
    entries: list[Entry] = json.loads(file.read_text(encoding="utf-8"))
    return entries


def summary(entries: Iterable[Entry]) -> str:
    """The entries in words, for the README."""
    return "; ".join(_in_words(each) for each in entries)


def _in_words(of: Entry) -> str:
    failed = f", {of['failed']} failed" if of["failed"] else ""
    return (
        f"{of['passed']} passed{failed} on an {of['card']} with transformers {of['transformers']} "
        f"({of['date']})"
    )


def stale(file: Path = FILE) -> list[str]:
    """Problems of a release: the entries of code that has changed since."""
    code = stamps.sha(stamps.sources(CODE))
    return [
        f"tests/{file.name}: the code has changed since {each['date']}, when the CUDA tests ran "
        f"with transformers {each['transformers']}: nox -s gpu"
        for each in read(file)
        if each["code"] != code
    ]


def run(workers: int) -> tuple[int, dict[str, int]]:
    """Run the tests; the worst exit code of pytest, and the counts."""
    runs = [_run(mark, workers if mark == MARKS[0] else 1) for mark in MARKS]
    total = {kind: sum(found[kind] for _, found in runs) for kind in runs[0][1]}
    return max(code for code, _ in runs), total


def _run(mark: str, workers: int) -> tuple[int, dict[str, int]]:
    spread = ("-n", str(workers), "--dist", "loadgroup") if workers > 1 else ()
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *spread, *TESTS, "-m", mark]
        command.append(f"--junitxml={report}")
        code = subprocess.call(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
        text = report.read_text(encoding="utf-8") if code in RAN else "<empty/>"
    return code, counts(text)


def card() -> dict[str, str]:
    """The name and the compute capability of the GPU."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA GPU, which these tests need")
    major, minor = torch.cuda.get_device_capability()
    return {"card": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=4, metavar="WORKERS", help="default: 4")
    parser.add_argument("--out", type=Path, default=FILE, metavar="FILE")
    options = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = card()
    code, ran = run(options.n)
    if code not in RAN:
        print(f"pytest ended with exit code {code}: nothing is written")
        return code
    new = entry(found, ran, date.today())
    add(new, options.out)
    print(f"{summary([new])}: written into {options.out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
