"""A process of the demo: it builds the files, or runs one story, and writes the outcome.

``python -m gemma4_compat.demo.worker FOLDER SCRATCH [MODULE FUNCTION]`` does one of these.
Without arguments it imports the libraries, then reads such arguments line by line from its standard
input, and forks a process for each line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path


def work(folder: Path, scratch: Path, module: str = "", function: str = "") -> None:
    """Write ``{"outcome": ..., "text": ...}`` to ``result.json`` in ``scratch``.

    After building, the text is the type of the execution device: "cpu" or "cuda".
    """
    from .stage import Failure, Stage

    stage = Stage(folder, scratch)
    try:
        if module:
            getattr(importlib.import_module(module), function)(stage)
            result = {"outcome": "equal", "text": "equal"}
        else:
            stage.build()
            result = {"outcome": "built", "text": "cpu" if stage.device == "cpu" else "cuda"}
    except Failure as failure:
        result = {"outcome": "wrong", "text": str(failure)}
    except Exception as error:
        traceback.print_exc()
        result = {"outcome": "error", "text": f"{type(error).__name__}: {one_line(str(error))}"}
    (scratch / "result.json").write_text(json.dumps(result))


def one_line(message: str) -> str:
    """A message on one line; a module printed in it over several lines becomes "(...)"."""
    return " ".join(re.sub(r"\(\n.*\n\)", "(...)", message, flags=re.DOTALL).split())


def serve() -> None:
    """Fork for every line of input; print the exit code when the fork has ended."""
    # If an import fails here, it fails again in the stories, which report it.
    with contextlib.suppress(Exception):
        for name in ("bitsandbytes", "peft", "accelerate.big_modeling"):
            importlib.import_module(name)
        importlib.import_module("transformers.models.gemma4.modeling_gemma4")
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        arguments, log, seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            _work_and_exit(arguments, log)
        print(json.dumps(_wait(child, seconds)), file=answers, flush=True)


def _work_and_exit(arguments: list[str], log: str) -> None:
    code = 1
    try:
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        _work(arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, seconds: float) -> int | None:
    """The exit code; ``None`` if the process was killed after ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _work(arguments: list[str]) -> None:
    folder, scratch, *story = arguments
    work(Path(folder), Path(scratch), *story)


if __name__ == "__main__":
    if sys.argv[1:]:
        _work(sys.argv[1:])
    else:
        serve()
