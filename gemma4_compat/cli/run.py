"""``gemma4-compat run``."""

from __future__ import annotations

import argparse

from .. import launcher
from ._command import Command

_HELP = """\
Run a Python program with the patches in place, without editing it:

  gemma4-compat run train.py --epochs 3
  gemma4-compat run -m package.train --epochs 3
  torchrun --nproc-per-node 2 -m gemma4_compat run train.py --epochs 3
  accelerate launch -m gemma4_compat run train.py --epochs 3

Everything after the program's name belongs to the program.  Processes that it starts with
multiprocessing (fork, spawn or forkserver) are patched as well; Python programs that it starts
by other means (subprocess, os.exec...) are not, unless they import gemma4_compat themselves.
"""


class _Run(Command):
    """Runs a program, and leaves its output, exceptions and exit code as they are."""

    def execute(self, options: argparse.Namespace) -> int:
        return launcher.run(options.program, as_module=options.module)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, not a file")


COMMAND = _Run(
    name="run",
    help="run a script or module with the patches in place",
    description=_HELP,
    arguments=_arguments,
    usage="gemma4-compat run [-h] {SCRIPT | -m MODULE} [ARG ...]",
    json=False,
)


def split_program(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split our own arguments from the program and its arguments.

    argparse would treat the program's options as ours, and treats "--" differently in each Python
    version.
    """
    if argv[:1] != ["run"]:
        return argv, []
    for index, argument in enumerate(argv[1:], start=1):
        if argument == "--":
            return argv[:index], argv[index + 1 :]
        if not argument.startswith("-"):
            return argv[:index], argv[index:]
    return argv, []
