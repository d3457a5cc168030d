"""Runs stories without and with the patches, each side in its own process."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from ..errors import InputError
from ..results.result import Result
from ..results.text import table
from .stories import Story

_BUILD = Story("build a tiny Gemma 4 and adapters for it", f"{__package__}.stage:build")
_SIDES = ("without", "with")
#: the time that a story may take
_SECONDS = 180
#: what a story takes, without and with the patches, as a share of what the build takes; measured
_SHARE = 0.7
#: characters of an exception's message in the table
_SHORT = 100


@dataclass(frozen=True)
class Outcome:
    """How a story ended: ``equal``, ``wrong``, ``error`` or ``crash``, and text about it."""

    outcome: str
    text: str

    @property
    def ok(self) -> bool:
        return self.outcome == "equal"

    def __str__(self) -> str:
        return textwrap.shorten(self.text, _SHORT, placeholder="...")


@dataclass(frozen=True)
class Demo(Result):
    """The stories, and how each ended "without" and "with" the patches.

    ``seconds`` is the duration of the demo.
    """

    stories: tuple[Story, ...]
    outcomes: tuple[Mapping[str, Outcome], ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every story succeeds with the patches."""
        return all(outcome["with"].ok for outcome in self.outcomes)

    @property
    def verdict(self) -> str:
        ours, alone = (sum(each[side].ok for each in self.outcomes) for side in ("with", "without"))
        return f"{ours} of {len(self.stories)} stories succeed with gemma4_compat, {alone} without"

    def as_dict(self) -> dict[str, Any]:
        """The stories and their outcomes, with the full text of exceptions."""
        rows = [
            {"story": story.title, **{side: asdict(outcome[side]) for side in _SIDES}}
            for story, outcome in zip(self.stories, self.outcomes, strict=True)
        ]
        return {"ok": self.ok, "seconds": self.seconds, "stories": rows}

    def _lines(self) -> Iterator[str]:
        for story, outcome in zip(self.stories, self.outcomes, strict=True):
            rows = [(side, outcome[side]) for side in _SIDES]
            yield from (story.title, table(rows, indent="  "), "")
        yield f"{self.verdict} ({self.seconds:.0f} s)"


def demo(stories: Sequence[Story], *, keep: Path | None = None) -> Demo:
    """Build a tiny model and run the stories on it; progress goes to stderr.

    Args:
        stories: the stories to run.
        keep: an empty or new folder, to keep checkpoint, adapters and logs in.

    Raises:
        InputError: ``keep`` is not empty, or the tiny model could not be built.
    """
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InputError(f"{keep} is not an empty folder")
    start = time.monotonic()
    # Windows keeps the memory-mapped files of a killed worker open for a moment.
    temporary = tempfile.TemporaryDirectory(prefix="gemma4-compat-", ignore_cleanup_errors=True)
    with temporary as path:
        folder = (keep or Path(path)).resolve()
        print(f"{_BUILD.title} ...", file=sys.stderr)
        # The process that builds also runs the stories, as starting one takes most of the time.
        begun = {"without": [_BUILD, *stories], "with": stories}
        sides = {side: _run(side, begun[side], folder) for side in _SIDES}
        built = next(sides["without"])
        if not built.ok:
            sides["without"].close()
            raise InputError(f"cannot build the model: {built.text}")
        seconds = (time.monotonic() - start) * _SHARE * len(stories)
        text = f"{len(stories)} stories, without and with the patches, take about {seconds:.0f} s"
        print(text, file=sys.stderr, flush=True)
        outcomes = play(stories, sides)
    return Demo(tuple(stories), tuple(outcomes), time.monotonic() - start)


def play(
    stories: Sequence[Story], sides: Mapping[str, Generator[Outcome]]
) -> list[dict[str, Outcome]]:
    """Run all stories without the patches, then all with them."""
    rows: list[dict[str, Outcome]] = [{} for _ in stories]
    done = itertools.count(1)
    for side in _SIDES:
        for row, story, outcome in zip(rows, stories, sides[side], strict=True):
            number = f"[{next(done)}/{len(_SIDES) * len(stories)}]"
            print(f"{number} {side:<7}  {story.title}: {outcome}", file=sys.stderr, flush=True)
            row[side] = outcome
    return rows


def _run(side: str, stories: Sequence[Story], folder: Path) -> Generator[Outcome]:
    """Run the stories in one process; after one that crashes or hangs, in a new process."""
    left, variables = list(stories), _environment(side)
    while left:
        worker = [sys.executable, "-m", f"{__package__}.worker", str(folder), str(folder / side)]
        worker += [story.function for story in left]
        with Popen(worker, stdin=DEVNULL, stdout=PIPE, env=variables, text=True) as process:
            assert process.stdout is not None
            try:
                for story in list(left):
                    late = threading.Event()

                    def stop(late: threading.Event = late) -> None:
                        late.set()
                        process.kill()

                    timer = threading.Timer(_SECONDS, stop)
                    timer.daemon = True
                    timer.start()
                    line = process.stdout.readline()
                    timer.cancel()
                    del left[0]
                    if line:
                        yield Outcome(**json.loads(line))
                        continue
                    if late.is_set():
                        yield Outcome("crash", f"not finished after {_SECONDS} s")
                    else:
                        yield _crash(process.wait(), folder / side / story.name / "log.txt")
                    break
            finally:
                process.kill()


def _crash(code: int, log: Path) -> Outcome:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return Outcome("crash", f"exit code {code}: {last}" if last else f"exit code {code}")


def _environment(side: str) -> dict[str, str]:
    ours = {name for name in os.environ if name.upper().startswith("GEMMA4_COMPAT")}
    variables = {name: os.environ[name] for name in os.environ.keys() - ours}
    if side == "without":
        variables["GEMMA4_COMPAT"] = "0"
    # The worker must import the same packages as we do.
    variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    # The logs have what transformers says; the demo's own process is silent.
    variables["TRANSFORMERS_VERBOSITY"] = "warning"
    return variables | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
