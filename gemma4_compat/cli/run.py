"""Run a program with the patches in place, without editing it.

  gemma4-compat run train.py --epochs 3
  gemma4-compat run -m package.train --epochs 3
  gemma4-compat run accelerate launch train.py --epochs 3
  gemma4-compat run torchrun --nproc-per-node 2 train.py --epochs 3
  gemma4-compat run deepspeed --num_gpus 2 train.py --epochs 3

The program is a file that this Python runs, or else a program beside this
Python or on PATH.  Everything after its name belongs to the program.

Python processes that it starts are patched as well: their PYTHONPATH has a
sitecustomize that imports gemma4_compat, and then any other sitecustomize.  Not
patched are those with Python's options -I, -E or -S, those with a PYTHONPATH
that the program has replaced, and those of a Python that has no gemma4_compat
(GEMMA4_COMPAT_STRICT=1 reports it).
"""

from __future__ import annotations

import argparse

from .. import launcher
from ..engine.patch import FAST_MEANS
from ._command import Command


class _Run(Command):
    """Runs a program, and leaves its output, exceptions and exit code as they are."""

    def execute(self, options: argparse.Namespace) -> int:
        return launcher.run(options.program, as_module=options.module, fast=options.fast)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, not a file")
    text = f"the faster patches, too, which {FAST_MEANS} (GEMMA4_COMPAT_FAST=1)"
    parser.add_argument("--fast", action="store_true", help=text)


_USAGE = "gemma4-compat run [-h] [--fast]\n       {SCRIPT | PROGRAM | -m MODULE} [ARG ...]"
COMMAND = _Run("run", __doc__, _arguments, usage=_USAGE)


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
