"""The processes of the demo: they build the files, or play one story, and write down how it went.

``python -m gemma4_compat.demo.worker FOLDER SCRATCH [MODULE FUNCTION]`` does one such thing.
Without arguments it imports the libraries and then does what it reads from its standard input, each
in a fork of its own.
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

    After building, the text is the kind of device that stories will be played on.
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
    """A message on one line, without the module that may be printed in it over several."""
    return " ".join(re.sub(r"\(\n.*\n\)", "(...)", message, flags=re.DOTALL).split())


def serve() -> None:
    """Fork for every line of input; answer with the exit code when the fork has ended."""
    # What cannot be imported will be a story's news.
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
    """The exit code; ``None`` if the time was up."""
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
