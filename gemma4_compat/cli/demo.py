"""``gemma4-compat demo``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..versions import WITH_TORCH
from ._libraries import require_libraries


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="try it on a tiny random Gemma 4: without and with the patches",
        description="Build a tiny random Gemma 4 and play users' stories on it, each in a process "
        "without the patches and in one with them.  Downloads nothing; takes a minute or two.",
    )
    demo.add_argument("--keep", metavar="DIR", help="keep checkpoint, adapters and logs in DIR")
    demo.add_argument("--json", action="store_true", help="print JSON")
    demo.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    if (code := require_libraries("demo", WITH_TORCH)) is not None:
        return code
    from ..demo.play import demo
    from ..demo.stories import STORIES

    keep = Path(options.keep) if options.keep else None
    try:
        return demo(STORIES, keep=keep, as_json=options.json)
    except KeyboardInterrupt:
        return 130
