"""Play users' stories, without and with the patches.

Builds a tiny random Gemma 4.  Downloads nothing; says how long it will take.

Exit code: 0 every story succeeds with the patches; 1 one does not; 2 invalid
argument, or the tiny model could not be built.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..results.result import Result
from ..versions import WITH_TORCH
from ._command import Command


def _arguments(parser: argparse.ArgumentParser) -> None:
    help = "keep checkpoint, adapters and logs in DIR"
    parser.add_argument("--keep", metavar="DIR", type=Path, help=help)


def _run(options: argparse.Namespace) -> Result:
    from ..demo.play import demo
    from ..demo.stories import STORIES

    return demo(STORIES, keep=options.keep)


COMMAND = Command("demo", __doc__, _arguments, _run, needs=WITH_TORCH)
