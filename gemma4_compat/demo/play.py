"""Runs stories without and with the patches, each in its own process, and prints a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ..errors import InputError
from ..result import Result
from ..text import columns
from .stories import Story

_SIDES = ("without", "with")
_WORKER = (sys.executable, "-m", f"{__package__}.worker")
_SECONDS = 180
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


@dataclass(frozen=True)
class Demo(Result):
    """The stories, and how each ended "without" and "with" the patches.

    ``seconds`` is the duration of the demo.
    """

    stories: tuple[Story, ...]
    outcomes: tuple[Mapping[str, Outcome], ...]
    seconds: float
    folder: Path | None

    @property
    def ok(self) -> bool:
        """Whether every story succeeds with the patches."""
        return all(outcome["with"].ok for outcome in self.outcomes)

    @property
    def verdict(self) -> str:
        good = sum(outcome["with"].ok for outcome in self.outcomes)
        return f"{good} of {len(self.stories)} stories succeed with gemma4_compat"

    def as_dict(self) -> dict[str, Any]:
        """The stories and their outcomes, with the full text of exceptions."""
        rows = [
            {"story": story.title, **{side: asdict(outcome[side]) for side in _SIDES}}
            for story, outcome in zip(self.stories, self.outcomes, strict=True)
        ]
        return {"ok": self.ok, "seconds": self.seconds, "stories": rows}

    def __str__(self) -> str:
        lines = [_table(self), "", f"{self.verdict} ({self.seconds:.0f} s)"]
        if self.folder is not None:
            lines.append(f"checkpoint, adapters and logs are in {self.folder}")
        return "\n".join(lines)


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
    progress = _Progress(1 + 2 * len(stories), sys.stderr)
    with _folder(keep) as folder, closing(progress):
        with progress.work("build a tiny Gemma 4 and adapters for it"):
            built = _process(_fresh(with_patches=False), folder, folder / "build")
        if built.outcome != "built":
            raise InputError(f"cannot build the model: {built.text}")
        outcomes = play(stories, folder, progress, device=built.text)
    return Demo(tuple(stories), tuple(outcomes), time.monotonic() - start, keep)


def play(
    stories: Sequence[Story], folder: Path, progress: _Progress, *, device: str
) -> list[dict[str, Outcome]]:
    """Run each story on both sides, each time in its own process."""

    def one(start: _Start, side: str, story: Story) -> Outcome:
        with progress.work(f"{side:<7}  {story.title}") as done:
            scratch = folder / side / story.function
            result = _process(start, folder, scratch, story.module, story.function)
            done(_short(result.text))
        return result

    def one_side(side: str) -> list[Outcome]:
        with _forking(folder / f"{side}.txt", with_patches=side == "with") as start:
            return [one(start, side, story) for story in stories]

    # CUDA does not survive a fork, and bitsandbytes starts it on import.
    forking = sys.platform == "linux" and device == "cpu"
    with ThreadPoolExecutor(len(_SIDES) if forking else _processes()) as pool:
        try:
            if forking:
                sides = [pool.submit(one_side, side) for side in _SIDES]
                by_side = [side.result() for side in sides]
            else:
                running = [
                    [pool.submit(one, _fresh(with_patches=s == "with"), s, story) for s in _SIDES]
                    for story in stories
                ]
                by_side = [[row[i].result() for row in running] for i in range(len(_SIDES))]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [dict(zip(_SIDES, row, strict=True)) for row in zip(*by_side, strict=True)]


def _table(demo: Demo) -> str:
    """A table with the columns story, without and with, as wide as the terminal."""
    width = max(60, min(columns(), 120))
    rows: list[tuple[str, ...]] = [("story", *_SIDES)]
    for story, outcome in zip(demo.stories, demo.outcomes, strict=True):
        rows.append((story.title, *(_short(outcome[side].text) for side in _SIDES)))
    # The last column is only as wide as its text, which is usually "equal".
    last = min(max(len(row[2]) for row in rows), width // 4)
    first = (width - last - 6) * 9 // 20
    widths = (first, width - last - 6 - first, last)
    lines = []
    for index, row in enumerate(rows):
        cells = [textwrap.wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, cells))):
            parts = [cell[line] if line < len(cell) else "" for cell in cells]
            padded = (f"{part:<{width}}" for part, width in zip(parts, widths, strict=True))
            lines.append(" | ".join(padded).rstrip())
        if index < len(rows) - 1:
            lines.append("-+-".join("-" * width for width in widths) if index == 0 else "")
    return "\n".join(lines)


def _short(text: str) -> str:
    return textwrap.shorten(text, _SHORT, placeholder="...")


# -- processes ----------------------------------------------------------------------------------

#: Runs a worker with these arguments, writes its output to this file, and returns the exit code.
_Start = Callable[[Sequence[str], Path], int]


def _process(start: _Start, folder: Path, scratch: Path, *story: str) -> Outcome:
    """Run a worker and return its outcome, even if it crashes or hangs."""
    scratch.mkdir(parents=True)
    log = scratch / "log.txt"
    try:
        code = start([str(folder), str(scratch), *story], log)
    except subprocess.TimeoutExpired:
        return Outcome("crash", f"not finished after {_SECONDS} s")
    except ChildProcessError as error:
        return Outcome("crash", str(error))
    try:
        return Outcome(**json.loads((scratch / "result.json").read_text()))
    except (OSError, ValueError):
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return Outcome("crash", f"exit code {code}: {last}" if last else f"exit code {code}")


def _fresh(*, with_patches: bool) -> _Start:
    """Start every worker as a new Python process."""

    def start(arguments: Sequence[str], log: Path) -> int:
        with log.open("wb") as output:
            return subprocess.run(
                [*_WORKER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(with_patches),
                timeout=_SECONDS,
                check=False,
            ).returncode

    return start


@contextmanager
def _forking(log: Path, *, with_patches: bool) -> Iterator[_Start]:
    """Start every worker as a fork of one process that has imported the libraries."""
    with log.open("wb") as errors, subprocess.Popen(
        _WORKER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=_environment(with_patches),
        text=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        requests, answers = server.stdin, server.stdout

        def start(arguments: Sequence[str], log: Path) -> int:
            answer = ""
            with suppress(BrokenPipeError):
                requests.write(json.dumps([arguments, str(log), _SECONDS]) + "\n")
                requests.flush()
                answer = answers.readline()
            if not answer:
                raise ChildProcessError("the process that imports the libraries has died")
            code: int | None = json.loads(answer)
            if code is None:
                raise subprocess.TimeoutExpired(_WORKER, _SECONDS)
            return code

        try:
            yield start
        except BaseException:
            server.kill()
            raise


def _processes() -> int:
    return min(4, max(2, (os.cpu_count() or 1) // 2))


def _environment(with_patches: bool) -> dict[str, str]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith("GEMMA4_COMPAT")
    }
    if not with_patches:
        variables["GEMMA4_COMPAT"] = "0"
    variables.update(
        # The worker must import the same packages as we do.
        PYTHONPATH=os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // _processes())),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    return variables


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    # Windows keeps the memory-mapped files of a killed worker open for a moment.
    with tempfile.TemporaryDirectory(prefix="gemma4-compat-", ignore_cleanup_errors=True) as path:
        yield Path(path)


class _Progress:
    """Prints a line for each finished task; on a terminal, rewrites a single line."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._terminal = stream.isatty()
        self._running: list[str] = []
        self._done = 0
        self._lock = threading.Lock()

    @contextmanager
    def work(self, label: str) -> Iterator[Callable[[str], None]]:
        """Show a task while the block runs; call the result with text about how it ended."""
        ended = [label]
        with self._lock:
            self._running.append(label)
            self._show()
        yield ended.append
        with self._lock:
            self._running.remove(label)
            self._done += 1
            if not self._terminal:
                print(f"[{self._done}/{self._total}] {': '.join(ended)}", file=self._stream)
            self._show()

    def close(self) -> None:
        """Clear the line on the terminal."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _show(self) -> None:
        if self._terminal and self._running:
            text = f"[{self._done}/{self._total}] {self._running[-1]} ..."
            width = columns() - 1
            self._stream.write(f"\r\x1b[K{text[:width]}")
        self._stream.flush()
