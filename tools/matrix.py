"""Measures every patch on released versions: writes ``tools/measured/PATCH.json``.

    python tools/matrix.py [PATCH ...] [--overlays FOLDER] [--offline] [--newest] [--jobs N]
    python tools/matrix.py --release LIBRARY==VERSION [--release ...]
    python tools/matrix.py --expiry

Takes each library through its releases, with the others at the users' versions and then at the
newest, and measures the patches that say they are affected by this library.  On the corners, it
measures all patches.  On each such stack the regression tests run twice, at the same time:
without the patches (does the bug show?) and with them (is it fixed?).  The Python that runs the
tests has torch and the libraries' dependencies.  The libraries themselves come from folders in
front of it on the path; each release is fetched once.

Measured stacks are skipped; for the PATCHes that are named, they are measured again.  It is safe to
interrupt.  Bugs that show only on a GPU are unknown on a machine without one; stacks measured on a
GPU are separate entries.

``--release`` measures another release, such as one that is not the last of its minor version, with
the other libraries at the users' versions.
``--newest`` measures the users' stack, the newest stack and, if a library has pre-releases, the
newest stack with each of them.  ``--expiry`` names the patches that the newest releases make
obsolete.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gemma4_compat.patches import LEGACY, load  # noqa: E402
from gemma4_compat.versions import FLOORS, LIBRARIES, MIDDLE, NEWEST, USERS  # noqa: E402
from tools.measured import DATA, Measured  # noqa: E402
from tools.overlays import FOLDER, Overlays  # noqa: E402

#: The first releases with Gemma 4 came in quick succession, and each changed something.
EVERY_PATCH_RELEASE_BEFORE = {"transformers": "5.7"}
SECONDS = 900

Stack = dict[str, str]


def releases(library: str, index: list[str]) -> list[str]:
    """The releases to measure: of transformers the last of each minor version, of others all."""
    known = sorted(Version(v) for v in index)
    known = [v for v in known if v >= Version(FLOORS[library]) and not v.is_prerelease]
    if (early := EVERY_PATCH_RELEASE_BEFORE.get(library)) is not None:
        last = {v.release[:2]: v for v in known}
        known = [v for v in known if v < Version(early) or last[v.release[:2]] == v]
    return [str(v) for v in known]


def index_of(library: str, folder: Path | None) -> list[str]:
    """All releases on the package index, or those that are in the folder."""
    if folder is not None:
        return [path.name.partition("-")[2] for path in folder.glob(f"{library}-*")]
    command = [sys.executable, "-m", "pip", "index", "versions", "--pre", library]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("Available versions:"))
    return line.partition(":")[2].replace(" ", "").split(",")


def early(of: dict[str, list[str]], index: dict[str, list[str]]) -> Iterator[Stack]:
    """The newest stack with the newest pre-release of one library, if that is later."""
    newest = {library: of[library][-1] for library in LIBRARIES}
    for library in LIBRARIES:
        last = max(index[library], key=Version)
        if Version(last) > Version(newest[library]):
            yield {**newest, library: last}


def stacks(of: dict[str, list[str]]) -> Iterator[tuple[Stack, str | None]]:
    """The users' and the newest stack; each library varied on both of them; the corners.

    With each stack comes the library that is varied, if it is one.
    """
    newest = {library: of[library][-1] for library in LIBRARIES}
    oldest = {library: of[library][0] for library in LIBRARIES}
    yield from ((USERS, None), (newest, None), (oldest, None))
    yield {**newest, "transformers": oldest["transformers"]}, None
    yield {**oldest, "transformers": newest["transformers"]}, None
    for library, anchor in itertools.product(LIBRARIES, (USERS, newest)):
        yield from (({**anchor, library: version}, library) for version in of[library])


def measure(stack: Stack, path: str, patches: list[str]) -> dict[str, str]:
    """For each patch "without/with/state"; empty if the stack cannot be imported."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            _start(Path(folder) / side, path, patches, switch)
            for side, switch in (("without", "0"), ("with", "1"))
        ]
        lines = [_finish(*side) for side in sides]
    results = {}
    for name in patches:
        tests = [
            [line["outcome"] for line in side if line["patch"] == name and "outcome" in line]
            for side in lines
        ]
        states = [e["state"] for e in lines[1] if e["patch"] == name and "state" in e]
        if states:
            results[name] = f"{without(tests[0])}/{with_(tests[1])}/{states[0]}"
    return results


def without(outcomes: list[str]) -> str:
    """The verdict of the tests on the bug."""
    ran = [each for each in outcomes if each != "skipped"]
    if "bug" in ran:
        return "broken"
    return "unknown" if not ran or set(ran) != {"passes"} else "fixed"


def with_(outcomes: list[str]) -> str:
    """The verdict of the tests on the patch."""
    ran = [each for each in outcomes if each != "skipped"]
    return "unknown" if not ran else "works" if set(ran) == {"passes"} else "fails"


def _start(file: Path, path: str, patches: list[str], switch: str) -> tuple[Any, Path]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((path, str(ROOT))),
        "GEMMA4_COMPAT": switch,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["-m", "regression", f"--matrix={file}", str(ROOT / "tests")]
    command += [f"--matrix-patch={name}" for name in patches]
    with file.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=file.parent, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    return process, file


def _finish(process: Any, file: Path) -> list[dict[str, str]]:
    try:
        process.wait(SECONDS)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    text = file.with_suffix(".log").read_text(errors="replace")
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not any("state" in line for line in lines):
        print("\n".join(text.splitlines()[-15:]))
    for line in lines:
        if line.get("outcome", "skipped") not in ("bug", "passes", "skipped"):
            print(f"    {file.name}: {line['test']}: {line['outcome'][:160]}")
    return lines


def add(stack: dict[str, str], results: dict[str, str]) -> None:
    """Write the results of patches on one stack, a line for each, in order of versions."""
    for patch, result in results.items():
        file = DATA / f"{patch}.json"
        entries = json.loads(file.read_text()) if file.exists() else []
        entries = [entry for entry in entries if not stack.items() <= entry.items()]
        entries.append({**stack, "result": result})
        entries.sort(key=lambda e: (e["device"], *(Version(e[n]) for n in ("torch", *LIBRARIES))))
        partial = file.with_suffix(".partial")
        partial.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
        partial.replace(file)


def expiry(measured: Measured) -> Iterator[str]:
    """Lines for each patch whose bug the newest releases do not have."""
    newest = measured.newest()
    yield "measured up to " + ", ".join(f"{name} {version}" for name, version in newest.items())
    obsolete = [patch for patch in load() if measured.on_newest(patch.name) == "fixed"]
    for patch in obsolete:
        axes = {library: measured.runs(patch.name, library) for library in LIBRARIES}
        gone = [f"{name}>={runs[-1].first}" for name, runs in axes.items() if len(runs) > 1]
        since = " or ".join(gone) or "the newest stack"
        _, until = LEGACY.get(patch.name, ("", ""))
        when = f"after {until}" if until else "when nothing older is supported"
        yield f"{patch.name}: fixed in {since}; {when}, delete"
        [file] = (ROOT / "gemma4_compat" / "patches").glob(f"*/{patch.name}.py")
        yield f"    {file.relative_to(ROOT).as_posix()} tests/patches/test_{patch.name}.py"
    if not obsolete:
        yield "these releases still need every patch"


def asked(of: dict[str, list[str]], options: Any) -> Iterator[tuple[Stack, str | None]]:
    """The stacks that the options ask for, each with the library that is varied, if it is one."""
    if options.release:
        for release in options.release:
            library, version = release.split("==")
            yield {**USERS, library: version}, library
    elif options.tested:
        yield from ((stack, None) for stack in (USERS, MIDDLE, FLOORS, NEWEST))
    else:
        yield from itertools.islice(stacks(of), 2 if options.newest else None)


def plan(measured: Measured, named: list[str], options: Any) -> list[Any]:
    """The stacks to measure, each with its patches that are not measured."""
    import torch

    machine = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__.partition("+")[0],
    }
    folder = options.overlays if options.offline else None
    index = {library: index_of(library, folder) for library in LIBRARIES}
    of = {library: releases(library, index[library]) for library in LIBRARIES}
    names = {
        patch.name: {Requirement(each).name for each in patch.requirements}
        for patch in load()
        if not named or patch.name in named
    }
    items: list[Any] = []
    pre_releases = ((stack, None) for stack in early(of, index)) if options.newest else ()
    for stack, varied in itertools.chain(asked(of, options), pre_releases):
        key = {**machine, **stack}
        wanted = [
            name
            for name, libraries in names.items()
            if (varied is None or varied in libraries)
            and (named or all(each.stack != key for each in measured.by_patch.get(name, ())))
        ]
        if wanted and (key, wanted) not in items:
            items.append((key, wanted))
    return items


def main() -> None:
    """Measure the stacks that are not measured yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patches", nargs="*", metavar="PATCH")
    parser.add_argument("--overlays", type=Path, default=FOLDER)
    parser.add_argument("--offline", action="store_true", help="use only releases in that folder")
    parser.add_argument("--newest", action="store_true", help="users' stack, newest, pre-releases")
    parser.add_argument("--tested", action="store_true", help="only the stacks of the tests")
    parser.add_argument("--release", action="append", default=[], metavar="LIBRARY==VERSION")
    parser.add_argument("--expiry", action="store_true", help="name the patches that are obsolete")
    parser.add_argument("--jobs", type=int, default=1, help="stacks at a time; each uses two cores")
    options = parser.parse_intermixed_args()
    if options.expiry:
        print("\n".join(expiry(Measured.read(DATA))))
        return
    options.overlays.mkdir(parents=True, exist_ok=True)
    if unknown := set(options.patches) - {patch.name for patch in load()}:
        parser.error(f"no such patch: {', '.join(sorted(unknown))}")
    overlays = Overlays(options.overlays)
    wanted = plan(Measured.read(DATA), options.patches, options)
    took: list[float] = []

    def one(item: Any) -> Any:
        start = time.monotonic()
        key, patches = item
        path = overlays.path(f"{name}=={key[name]}" for name in LIBRARIES)
        return key, measure(key, path, patches), time.monotonic() - start

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for number, (key, results, seconds) in enumerate(pool.map(one, wanted), 1):
                add(key, results)
                took.append(seconds)
                left = statistics.median(took) * (len(wanted) - number) / options.jobs / 60
                title = ", ".join(f"{name} {version}" for name, version in key.items())
                print(f"[{number}/{len(wanted)}] {title}: {seconds:.0f} s; {left:.0f} min left")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


if __name__ == "__main__":
    main()
