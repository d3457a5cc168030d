"""A process of the demo: it runs stories one after the other, and prints how each ended.

``python -m gemma4_compat.demo.worker FOLDER SCRATCH MODULE:FUNCTION...``
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
from pathlib import Path

from .stage import Failure, Stage


def work(stage: Stage, story: str) -> dict[str, str]:
    """Run a story; returns its outcome and a text about it."""
    module, _, function = story.partition(":")
    try:
        getattr(importlib.import_module(module), function)(stage)
        return {"outcome": "equal", "text": "equal"}
    except Failure as failure:
        return {"outcome": "wrong", "text": str(failure)}
    except Exception as error:
        traceback.print_exc()
        return {"outcome": "error", "text": f"{type(error).__name__}: {one_line(str(error))}"}


def one_line(message: str) -> str:
    """A message on one line; a module printed in it over several lines becomes "(...)"."""
    return " ".join(re.sub(r"\(\n.*\n\)", "(...)", message, flags=re.DOTALL).split())


def main(folder: str, scratch: str, *stories: str) -> None:
    """Run the stories; what each prints goes to a log in its own folder in ``scratch``."""
    answers = os.fdopen(os.dup(1), "w")
    for story in stories:
        stage = Stage(Path(folder), Path(scratch, story.rpartition(":")[2]))
        stage.scratch.mkdir(parents=True)
        with (stage.scratch / "log.txt").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        answer = json.dumps(work(stage, story))
        sys.stdout.flush()
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
