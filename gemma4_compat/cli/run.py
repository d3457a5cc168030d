"""``gemma4-compat run``."""

from __future__ import annotations

import argparse

from .. import launcher

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


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="run a script or module with the patches in place",
        usage="gemma4-compat run [-h] {SCRIPT | -m MODULE} [ARG ...]",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("-m", dest="module", action="store_true", help="run a module, not a file")
    run.set_defaults(
        execute=lambda options: launcher.run(options.program, as_module=options.module)
    )


def split_program(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the program to run with its.

    argparse would look for our options among the program's, and each Python version treats "--"
    differently.
    """
    if argv[:1] != ["run"]:
        return argv, []
    for index, argument in enumerate(argv[1:], start=1):
        if argument == "--":
            return argv[:index], argv[index + 1 :]
        if not argument.startswith("-"):
            return argv[:index], argv[index:]
    return argv, []
