"""The command line: one module per command.

A command imports the libraries only when it needs them.
"""

from __future__ import annotations

import argparse
import os
import sys

from .. import __version__
from . import adapter, demo, device_map, merge, plan, report, run, scan, status
from ._command import Command, Help, Parser

COMMANDS: tuple[Command, ...] = tuple(
    module.COMMAND for module in (status, run, plan, device_map, scan, adapter, report, merge, demo)
)
_EXAMPLES = """\
examples:
  gemma4-compat status                                whether all is well, or what to do
  gemma4-compat plan gemma-4-E4B-it --gpu 12GiB       a device map that fits, as Python
  gemma4-compat adapter my-lora --model gemma-4-E4B-it
  gemma4-compat run train.py                          your script, with the patches

gemma4-compat COMMAND --help describes a command.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv, program = run.split_program(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not argv or argv == ["help"]:
        parser.print_help()
        return 0
    try:
        options = parser.parse_args(argv, argparse.Namespace(program=program))
    except KeyboardInterrupt:  # while the Hub is asked for an argument
        parser.exit(130, f"gemma4-compat {argv[0]}: interrupted\n")
    if options.command == run.COMMAND.name and not program:
        parser.exit(2, "gemma4-compat run: name a script or program, or a module after -m\n")
    try:
        code: int = options.execute(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if options.command == run.COMMAND.name:
            raise
        # A reader such as ``| head`` closed the pipe.  Else Python would report that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> Parser:
    parser = Parser(
        prog="gemma4-compat",
        description="Run and fine-tune Gemma 4 on small GPUs, without the known errors.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("-V", "--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
