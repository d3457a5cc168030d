"""The tests of transformers, accelerate, peft and bitsandbytes, without and with the patches.

    python tools/upstream.py [LIBRARY ...]

Runs, in the libraries' installed versions, the part of their own tests that is about what the
patches touch: once in a plain process, once in one that has gemma4_compat in place before
anything else is imported.  What passes without and not with is run again, alone, and is a
regression if it does not pass then either.  Ends with 0 only if there is no regression and the
tests of every library asked for (all without names) were run to the end.

The tests come from the version's tag on GitHub, else, where it holds them, from the source
distribution on PyPI.  A folder named NAME-VERSION below ``$UPSTREAM_SOURCES``, such as
``peft-0.21.2``, takes precedence; where that is a link, the table says what it leads to.

The Hub is not asked (``HF_HUB_OFFLINE=0`` in the environment changes that): tests that need it
fail either way, and count as such.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

SECONDS_PER_TEST = 120
#: So many suspects are run again, alone; more have one cause, which will be found in these.
MOST_AGAIN = 20
PLAIN: tuple[str, ...] = ()
PATCHED = ("-m", "gemma4_compat", "run")
SEVERITY = ("skipped", "passed", "failed")
#: Imported before the tests, in both modes: a patch waits for all its targets, and few tests
#: import all of them.
TARGETS = ("transformers.models.gemma4.modeling_gemma4", "accelerate", "bitsandbytes", "peft")


@dataclass(frozen=True)
class Suite:
    """The tests of one library that are run."""

    repository: str
    tag: str
    arguments: tuple[str, ...]
    #: whether the source distribution on PyPI holds these tests
    in_sdist: bool = False


SUITES = {
    "accelerate": Suite(
        "huggingface/accelerate",
        "v{}",
        (
            "tests/test_hooks.py",
            "tests/test_big_modeling.py",
            "tests/test_modeling_utils.py",
            "tests/test_offload.py",
        ),
        in_sdist=True,
    ),
    "bitsandbytes": Suite(
        "bitsandbytes-foundation/bitsandbytes",
        "{}",
        (
            "tests/test_linear4bit.py",
            "tests/test_linear8bitlt.py",
            "tests/test_functional.py",
            # Of test_functional.py what is about 4 bits, but for the large products: they take
            # half an hour on a CPU.
            "-k=linear4bit or linear8bitlt or 4bit and not (gemv_4bit and (512 or 1024))",
            "-m=not slow and not benchmark and not deprecated",
        ),
    ),
    "transformers": Suite(
        "huggingface/transformers",
        "v{}",
        (
            "tests/models/gemma4/test_modeling_gemma4.py",
            "tests/models/gemma3n/test_modeling_gemma3n.py",
        ),
    ),
    "peft": Suite(
        "huggingface/peft",
        "v{}",
        (
            "tests/test_low_level_api.py",
            "tests/test_tuners_utils.py",
            "tests/test_initialization.py",
            "tests/test_custom_models.py",
            # a fifth of all tests: each dtype with each configuration, on the same code
            "-k=not adapter_dtype_autocast",
        ),
        in_sdist=True,
    ),
}


class Unavailable(Exception):
    """The tests of a library cannot be had."""


# -- where the tests come from --------------------------------------------------------------------


def sources(name: str, version: str, cache: Path) -> Path:
    """A folder with the tests of that version, and the files that configure them."""
    folder = f"{name}-{version}"
    if given := os.environ.get("UPSTREAM_SOURCES"):
        if (Path(given) / folder).exists():
            return (Path(given) / folder).resolve()
    if not (cache / folder).exists():
        suite = SUITES[name]
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            try:
                packed = from_github(suite, version)
            except OSError as error:
                if not suite.in_sdist:
                    raise Unavailable(f"GitHub: {error}") from error
                packed = from_pypi(name, version, Path(temporary))
            unpack(packed, Path(temporary) / folder)
            (Path(temporary) / folder).rename(cache / folder)
    # transformers' tests read the library's files beside them: those that are installed.
    library = cache / folder / "src" / name
    library.parent.mkdir(exist_ok=True)
    library.unlink(missing_ok=True)
    library.symlink_to(str(metadata.distribution(name).locate_file(name)))
    return cache / folder


def from_github(suite: Suite, version: str) -> bytes:
    tag = suite.tag.format(version)
    url = f"https://github.com/{suite.repository}/archive/refs/tags/{tag}.tar.gz"
    print("fetching", url, flush=True)
    with urllib.request.urlopen(url, timeout=60) as answer:
        return bytes(answer.read())


def from_pypi(name: str, version: str, folder: Path) -> bytes:
    print(f"fetching the source distribution of {name} {version}", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=:all:"]
    if subprocess.call([*pip, f"--dest={folder}", f"{name}=={version}"]):
        raise Unavailable("neither GitHub nor PyPI has it")
    return next(folder.glob("*.tar.gz")).read_bytes()


def unpack(packed: bytes, folder: Path) -> None:
    """Unpack the tests but not the library, which would hide the one that is installed."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            path = Path(*Path(member.name).parts[1:])
            # transformers' tests import from its utils
            wanted = path.parts[:1] in (("tests",), ("utils",))
            if wanted or str(path) in ("conftest.py", "pyproject.toml"):
                if member.isfile() and ".." not in path.parts:
                    content = archive.extractfile(member)
                    assert content is not None
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (folder / path).write_bytes(content.read())
    # Source distributions leave it out, and relative imports among the tests need it.
    (folder / "tests" / "__init__.py").touch()


# -- one run --------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one pytest process did."""

    outcomes: dict[str, str] = field(default_factory=dict)
    #: the patches applied; None where gemma4_compat was not imported
    patches: list[str] | None = None
    finished: bool = False
    seconds: float = 0.0

    @property
    def passed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}


def run(mode: tuple[str, ...], folder: Path, arguments: list[str], out: Path, limit: int) -> Result:
    """Run pytest in ``folder``, its output in ``out`` with the suffix ``.txt``."""
    record = out.with_suffix(".jsonl")
    record.unlink(missing_ok=True)
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **os.environ}
    # An empty addopts: options of plugins that are not installed, or that take long.
    options = ["-q", "-rfE", "--tb=short", "-o", "addopts=", "-o", "log_cli=false"]
    options += ["--continue-on-collection-errors"]
    options += ["-p", "no:cacheprovider", f"--timeout={SECONDS_PER_TEST}", f"--rootdir={folder}"]
    command = [sys.executable, *mode, __file__, "--inside", str(record), *options, *arguments]
    began = time.monotonic()
    with out.with_suffix(".txt").open("w") as text:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=text, stderr=subprocess.STDOUT
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    result = Result(seconds=time.monotonic() - began)
    for line in record.read_text().splitlines() if record.exists() else ():
        entry = json.loads(line)
        if "test" in entry:
            # There are several of a test that has subtests, or that fails after its call.
            outcomes = (result.outcomes.get(entry["test"], "skipped"), entry["outcome"])
            result.outcomes[entry["test"]] = max(outcomes, key=SEVERITY.index)
        else:
            result.patches, result.finished = entry["patches"], entry["finished"]
    return result


class Recorder:
    """A pytest plugin that writes each outcome down as it comes: what is killed has a record."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def write(self, **entry: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self.write(test=report.nodeid, outcome=report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            self.write(test=report.nodeid, outcome=report.outcome)

    def pytest_sessionstart(self) -> None:
        self.pytest_sessionfinish(-1)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        ours = sys.modules.get("gemma4_compat")
        patches = ours and [one.name for one in ours.status() if one.state == "applied"]
        self.write(patches=patches, finished=exitstatus in (0, 1))


def inside(record: str, *arguments: str) -> int:
    """Be ``python -m pytest``, with the recorder."""
    import pytest

    del sys.path[0]
    for target in TARGETS:
        importlib.import_module(target)
    sys.path.insert(0, os.getcwd())
    if os.environ["HF_HUB_OFFLINE"] == "1":
        # PEFT's tests go online whatever the environment says, and where there is no network
        # each waits long for the Hub.
        vars(sys.modules["huggingface_hub.constants"])["is_offline_mode"] = lambda: True
    return int(pytest.main(list(arguments), plugins=[Recorder(record)]))


# -- both, compared -------------------------------------------------------------------------------


@dataclass
class Comparison:
    """One library's tests, without and with the patches."""

    plain: Result
    patched: Result
    regressions: list[str]
    flaky: list[str]

    @property
    def fixed(self) -> list[str]:
        return sorted(self.patched.passed - self.plain.passed & self.plain.outcomes.keys())


def compare(name: str, folder: Path, out: Path, limit: int, extra: list[str]) -> Comparison:
    arguments = [*SUITES[name].arguments, *extra]
    arguments = [a for a in arguments if not a.endswith(".py") or (folder / a).exists()]
    results = []
    for label, mode in (("without", PLAIN), ("with", PATCHED)):
        result = run(mode, folder, arguments, out / f"{name}-{label}", limit)
        patches = "unpatched" if result.patches is None else f"{len(result.patches)} patches"
        end = "" if result.finished else ", NOT FINISHED"
        counts = Counter(result.outcomes.values())
        count = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        print(f"  {label}: {count}; {patches}; {result.seconds:.0f} s{end}", flush=True)
        results.append(result)
    plain, patched = results
    if not plain.passed:
        raise Unavailable(f"no test passes without the patches: see {out / name}-without.txt")
    if plain.patches is not None or not patched.patches:
        raise Unavailable(f"not without and with the patches: see {out / name}-with.txt")
    if plain.seconds >= limit or patched.seconds >= limit:
        # Only what both came to says anything.
        both = plain.outcomes.keys() & patched.outcomes.keys()
        for result in results:
            result.outcomes = {t: o for t, o in result.outcomes.items() if t in both}
    suspects = sorted(plain.passed - patched.passed)
    regressions = suspects[MOST_AGAIN:]
    flaky: list[str] = []
    for number, test in enumerate(suspects[:MOST_AGAIN]):
        alone = {}
        for label, mode in (("without", PLAIN), ("with", PATCHED)):
            again = run(mode, folder, [test], out / f"{name}-again-{number}-{label}", 600)
            alone[label] = "passes" if test in again.passed else "fails"
        print(f"  alone: {alone['without']} without, {alone['with']} with: {test}", flush=True)
        (flaky if alone["with"] == "passes" else regressions).append(test)
    return Comparison(plain, patched, sorted(regressions), flaky)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", nargs="*", help=f"all without: {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, default=Path("upstream"), help="output and sources")
    parser.add_argument(
        "--limit",
        type=int,
        default=3600,
        help="seconds for each run; past them, what both came to counts",
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="pytest's -k, in place of ours")
    options = parser.parse_args()
    if unknown := set(options.library) - set(SUITES):
        parser.error(f"no such library: {', '.join(unknown)}")
    out = options.out.resolve()
    (out / "sources").mkdir(parents=True, exist_ok=True)
    columns = (
        *("library", "version", "tests of", "tests", "passed without", "passed with"),
        *("regressions", "fixed"),
    )
    rows = [" | ".join(columns), " | ".join(["---"] * 3 + ["---:"] * 5)]
    failed = False
    for name in options.library or SUITES:
        version = metadata.version(name)
        print(name, version, flush=True)
        try:
            folder = sources(name, version, out / "sources")
            extra = [f"-k={options.k}"] if options.k else []
            found = compare(name, folder, out, options.limit, extra)
        except Unavailable as error:
            rows.append(f"{name} | {version} | NOT RUN: {error} | | | | |")
            failed = True
            continue
        for kind in ("regressions", "flaky", "fixed"):
            for test in getattr(found, kind):
                print(f"  {kind.removesuffix('s')}: {test}")
        tests = found.plain.outcomes.keys() | found.patched.outcomes.keys()
        sets = (tests, found.plain.passed, found.patched.passed, found.regressions, found.fixed)
        whole = found.plain.finished and found.patched.finished
        note = "" if whole else ", NOT FINISHED"
        failed = failed or bool(found.regressions) or not whole
        figures = " | ".join(str(len(each)) for each in sets)
        rows.append(f"{name} | {version} | {folder.name}{note} | {figures}")
    print(*rows, sep="\n")
    (out / "summary.md").write_text("\n".join(rows) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(inside(*sys.argv[2:]) if sys.argv[1:2] == ["--inside"] else main())
