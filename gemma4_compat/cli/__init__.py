"""The command line: one module a command.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import os
import sys

from .. import __version__
from . import adapter, demo, map, merge, plan, report, run, scan, status

COMMANDS = (status, run, plan, map, scan, adapter, report, merge, demo)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv, program = run.split_program(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="gemma4-compat",
        description="Makes Gemma 4 work with transformers, accelerate, peft and bitsandbytes.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    options = parser.parse_args(argv, argparse.Namespace(program=program))
    if options.command == "run" and not program:
        parser.error("run: name a script, or a module after -m")
    try:
        code = int(options.execute(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if options.command == "run":
            raise
        # ``| head`` has read enough; Python would complain once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
