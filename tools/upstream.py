"""Runs the tests of transformers, accelerate, peft and bitsandbytes without and with the patches.

    python tools/upstream.py [LIBRARY ...]

Uses the installed versions of the libraries, and those of their tests that cover the code that the
patches change.  The tests run once in a plain process, and at the same time in a process that
imports gemma4_compat before anything else.  Tests that pass in one of the two only are run again,
three times in each.  A test is a regression if it fails with the patches more often than without.
The exit code is 0 only if there is no regression and all tests of the named libraries (default: all
libraries) were run.

The results are stored in ``tools/libraries.json``, for each release that was run, and
``docs/libraries-tests.md`` is written from them.

The tests come from the version's tag on GitHub, or else from the source distribution on PyPI if
that contains them.  A folder named NAME-VERSION in ``$UPSTREAM_SOURCES``, such as ``peft-0.21.2``,
takes precedence; if it is a link, the table shows its target.  transformers' tests need a link
``src/transformers`` to the installed library in it.

The tests run offline, unless ``HF_HUB_OFFLINE=0`` is in the environment.  Tests that need the Hub
then fail without and with the patches; they are counted apart.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

SECONDS_PER_TEST = 120
#: At most so many tests are run again; if more differ, they are likely to have one cause.
MOST_AGAIN = 40
TIMES_AGAIN = 3
PLAIN: tuple[str, ...] = ()
PATCHED = ("-m", "gemma4_compat", "run")
SEVERITY = ("skipped", "passed", "offline", "failed")
#: in the errors of tests that need the Hub
OFFLINE = re.compile(
    r"OfflineModeIsEnabled|LocalEntryNotFound|offline mode|couldn't connect to|outgoing traffic"
    r"|couldn't find them in the cached files|is not a local folder|Max retries exceeded"
)
ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tools" / "libraries.json"
PAGE = ROOT / "docs" / "libraries-tests.md"
PAGE_BEGIN = """# The libraries' own tests, without and with the patches

<!-- Written by `tools/upstream.py`; do not edit.  Explanations are in `tools/libraries.json`. -->

`nox -s upstream` runs tests of transformers, accelerate, peft and bitsandbytes without this
package, and with it imported before anything else.  No result may get worse.  The tests run
without a network, and on a CPU unless the heading names a GPU: *no network* counts those that fail
because they need the Hub.  Tests that fail both times do so without this package as well.
"""
STOPPED = "  **Both runs were stopped**: only the tests that both reached are counted."
#: Imported before the tests, in both modes: a patch is applied when all its targets are imported,
#: and few tests import all of them.
TARGETS = ("transformers.models.gemma4.modeling_gemma4", "accelerate", "bitsandbytes", "peft")


@dataclass(frozen=True)
class Suite:
    """The tests to run of one library."""

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
            "tests/test_accelerator.py",
            "tests/test_activation_checkpointing_offload.py",
            "tests/test_grad_sync.py",
            "tests/test_memory_utils.py",
            "tests/test_quantization.py",
            "tests/test_utils.py",
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
            "tests/test_modules.py",
            "tests/test_parametrize.py",
            # Of test_functional.py only the 4-bit tests, without the large products; nothing is
            # compiled.  Those take hours on a CPU.
            "-k=(linear or modules or parametrize or 4bit) and not compile"
            " and not (gemv_4bit and (512 or 1024))",
            "-m=not slow and not benchmark and not deprecated",
        ),
    ),
    "transformers": Suite(
        "huggingface/transformers",
        "v{}",
        (
            "tests/models/gemma4/test_modeling_gemma4.py",
            "tests/models/gemma3n/test_modeling_gemma3n.py",
            "tests/models/gemma4_unified/test_modeling_gemma4_unified.py",
            "tests/utils/test_cache_utils.py",
            "tests/utils/test_core_model_loading.py",
            "tests/utils/test_masking_utils.py",
            "tests/trainer/test_trainer_accelerator.py",
            "tests/trainer/test_trainer_checkpointing.py",
            "tests/quantization/bnb/test_4bit.py",
            "tests/quantization/bnb/test_mixed_int8.py",
            "tests/peft_integration/test_peft_integration.py",
            "tests/trainer/test_trainer.py",
            "tests/utils/test_modeling_utils.py",
            "tests/generation/test_utils.py",
        ),
    ),
    "peft": Suite(
        "huggingface/peft",
        "v{}",
        (
            "tests/test_low_level_api.py",
            "tests/test_tuners_utils.py",
            "tests/test_initialization.py",
            "tests/test_mixed.py",
            "tests/test_other.py",
            "tests/test_custom_models.py",
            "tests/test_common_gpu.py",
            # These are a fifth of all tests, and run the same code with every dtype.
            "-k=not adapter_dtype_autocast",
        ),
        in_sdist=True,
    ),
}


class Unavailable(Exception):
    """The tests of a library cannot be fetched or run."""


# -- where the tests come from --------------------------------------------------------------------


def sources(name: str, version: str, cache: Path) -> Path:
    """A folder with the tests of that version and their configuration files."""
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
    # transformers' tests read the library's files beside them: link the installed ones.
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
        raise Unavailable("neither GitHub nor PyPI has its tests")
    return next(folder.glob("*.tar.gz")).read_bytes()


def unpack(packed: bytes, folder: Path) -> None:
    """Unpack the tests but not the library: it would hide the installed one."""
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
    # Relative imports among the tests need this file; source distributions leave it out.
    (folder / "tests" / "__init__.py").touch()


# -- one run --------------------------------------------------------------------------------------


@dataclass
class Result:
    """The outcomes of one pytest process."""

    outcomes: dict[str, str] = field(default_factory=dict)
    #: the applied patches; None if gemma4_compat was not imported
    patches: list[str] | None = None
    finished: bool = False
    seconds: float = 0.0

    @property
    def passed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}


def run(mode: tuple[str, ...], folder: Path, arguments: list[str], out: Path, limit: int) -> Result:
    """Run pytest in ``folder``; the file ``out`` with the suffix ``.txt`` gets its output."""
    record = out.with_suffix(".jsonl")
    record.unlink(missing_ok=True)
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **os.environ}
    # addopts is emptied: it has options of plugins that are not installed, or that take long.
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
            # A test that has subtests, or that fails after its call, has several outcomes.
            outcomes = (result.outcomes.get(entry["test"], "skipped"), entry["outcome"])
            result.outcomes[entry["test"]] = max(outcomes, key=SEVERITY.index)
        else:
            result.patches, result.finished = entry["patches"], entry["finished"]
    return result


class Recorder:
    """A pytest plugin that writes each outcome at once, so that a killed run has a record."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def write(self, **entry: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            offline = report.failed and OFFLINE.search(report.longreprtext)
            self.write(test=report.nodeid, outcome="offline" if offline else report.outcome)

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
    """Do what ``python -m pytest`` does, with the recorder as a plugin."""
    import pytest

    del sys.path[0]
    for target in TARGETS:
        importlib.import_module(target)
    sys.path.insert(0, os.getcwd())
    if os.environ["HF_HUB_OFFLINE"] == "1":
        # PEFT's tests ignore the environment variable.  Without a network, each of them waits long
        # for the Hub.
        vars(sys.modules["huggingface_hub.constants"])["is_offline_mode"] = lambda: True
    return int(pytest.main(list(arguments), plugins=[Recorder(record)]))


# -- both, compared -------------------------------------------------------------------------------


@dataclass
class Comparison:
    """One library's tests, without and with the patches."""

    plain: Result
    patched: Result
    #: the tests that pass in one of both only: how many of the repeated runs they pass
    again: dict[str, tuple[int, int]]

    @property
    def regressions(self) -> list[str]:
        return sorted(test for test, (plain, patched) in self.again.items() if patched < plain)

    @property
    def fixed(self) -> list[str]:
        return sorted(test for test, (plain, patched) in self.again.items() if patched > plain)

    def of_modules(self) -> dict[str, dict[str, dict[str, int]]]:
        """How many tests of each module had which outcome, without and with the patches."""
        modules: dict[str, dict[str, dict[str, int]]] = {}
        for label, result in (("without", self.plain), ("with", self.patched)):
            for test, outcome in result.outcomes.items():
                counts = modules.setdefault(test.partition("::")[0], {"without": {}, "with": {}})
                counts[label][outcome] = counts[label].get(outcome, 0) + 1
        return dict(sorted(modules.items()))


def compare(name: str, folder: Path, out: Path, limit: int, extra: list[str]) -> Comparison:
    arguments = [*SUITES[name].arguments, *extra]
    arguments = [a for a in arguments if not a.endswith(".py") or (folder / a).exists()]
    sides = {"without": PLAIN, "with": PATCHED}
    with ThreadPoolExecutor(len(sides)) as pool:
        runs = [
            pool.submit(run, mode, folder, arguments, out / f"{name}-{label}", limit)
            for label, mode in sides.items()
        ]
    results = [each.result() for each in runs]
    for label, result in zip(sides, results, strict=True):
        patches = "unpatched" if result.patches is None else f"{len(result.patches)} patches"
        end = "" if result.finished else ", NOT FINISHED"
        counts = Counter(result.outcomes.values())
        count = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        print(f"  {label}: {count}; {patches}; {result.seconds:.0f} s{end}", flush=True)
    plain, patched = results
    if not plain.passed:
        raise Unavailable(f"no test passes without the patches: see {out / name}-without.txt")
    if plain.patches is not None or not patched.patches:
        raise Unavailable(f"the patches were on or off in both runs: see {out / name}-with.txt")
    if plain.seconds >= limit or patched.seconds >= limit:
        # A run was stopped: compare only the tests that both runs reached.
        both = plain.outcomes.keys() & patched.outcomes.keys()
        for result in results:
            result.outcomes = {t: o for t, o in result.outcomes.items() if t in both}
    suspects = sorted(plain.passed ^ patched.passed)
    again = {test: (int(test in plain.passed), int(test in patched.passed)) for test in suspects}
    if 0 < len(suspects) <= MOST_AGAIN:
        passes: Counter[tuple[str, str]] = Counter()
        for number in range(TIMES_AGAIN):
            for label, mode in sides.items():
                repeated = run(mode, folder, suspects, out / f"{name}-again-{number}-{label}", 1200)
                passes.update((label, test) for test in repeated.passed)
        again = {test: (passes["without", test], passes["with", test]) for test in suspects}
    return Comparison(plain, patched, again)


# -- what is stored of it -------------------------------------------------------------------------


def store(name: str, version: str, tests_of: str, result: Comparison) -> None:
    """Replace the release's part of ``DATA``; explanations of the same differences stay."""
    import torch

    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    release = f"{name} {version}"
    if torch.cuda.is_available():
        release += f" on {torch.cuda.get_device_name()}"
    why = data.get(release, {}).get("differences", {})
    names = ("torch", *SUITES)
    data[release] = {
        "tests of": tests_of,
        "with": {each: metadata.version(each) for each in names if each != name},
        "patches": len(result.patched.patches or ()),
        "seconds": [round(result.plain.seconds), round(result.patched.seconds)],
        "finished": result.plain.finished and result.patched.finished,
        "modules": result.of_modules(),
        "differences": {
            test: {"passes": passes, "why": why.get(test, {}).get("why", "")}
            for test, passes in result.again.items()
        },
    }
    DATA.write_text(json.dumps(dict(sorted(data.items())), indent=1) + "\n")


def page() -> str:
    """``docs/libraries-tests.md``."""
    data = json.loads(DATA.read_text())
    lines = [PAGE_BEGIN]
    for release, part in data.items():
        seconds, others = part["seconds"], ", ".join(" ".join(v) for v in part["with"].items())
        lines += [
            f"## {release}\n",
            f"The tests of {part['tests of']}, with {others}; {part['patches']} patches applied."
            f" {seconds[0]} s without them, {seconds[1]} s with them."
            + ("" if part["finished"] else STOPPED)
            + "\n",
            "| module | tests | passed without | with | failed with | no network | skipped |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        total: Counter[str] = Counter()
        for module, counts in part["modules"].items():
            with_ = counts["with"]
            row = {"tests": sum(with_.values()), "without": counts["without"].get("passed", 0)}
            row |= {kind: with_.get(kind, 0) for kind in ("passed", "failed", "offline", "skipped")}
            total.update(row)
            lines.append(" | ".join([f"| `{module}`", *map(str, row.values())]) + " |")
        lines.append(" | ".join(["| all", *(str(n) for n in total.values())]) + " |\n")
        for test, each in part["differences"].items():
            plain, patched = each["passes"]
            lines.append(
                f"- `{test}` passes {plain} of {TIMES_AGAIN} times without and {patched} of"
                f" {TIMES_AGAIN} times with the patches: {each['why'] or 'not explained'}"
            )
        if not part["differences"]:
            lines.append("Every test has the same outcome without and with the patches.")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", nargs="*", help=f"default: all of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, default=Path("upstream"), help="output and sources")
    parser.add_argument(
        "--limit",
        type=int,
        default=3600,
        help="seconds for each run; after a timeout, only tests that both runs reached count",
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="pytest's -k, replacing ours")
    options = parser.parse_args()
    if unknown := set(options.library) - set(SUITES):
        parser.error(f"no tests for {', '.join(unknown)}: choose from {', '.join(SUITES)}")
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
            result = compare(name, folder, out, options.limit, extra)
        except Unavailable as error:
            rows.append(f"{name} | {version} | NOT RUN: {error} | | | | |")
            failed = True
            continue
        for test, (plain, patched) in result.again.items():
            print(f"  passes {plain} times without, {patched} times with: {test}")
        if not options.k:
            store(name, version, folder.name, result)
            PAGE.write_text(page())
        tests = result.plain.outcomes.keys() | result.patched.outcomes.keys()
        sets = (tests, result.plain.passed, result.patched.passed, result.regressions, result.fixed)
        whole = result.plain.finished and result.patched.finished
        note = "" if whole else ", NOT FINISHED"
        failed = failed or bool(result.regressions) or not whole
        figures = " | ".join(str(len(each)) for each in sets)
        rows.append(f"{name} | {version} | {folder.name}{note} | {figures}")
    print(*rows, sep="\n")
    (out / "summary.md").write_text("\n".join(rows) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(inside(*sys.argv[2:]) if sys.argv[1:2] == ["--inside"] else main())
