"""Show whether the patches are in place.

Names those that need attention; with -v every patch, its state here and why.
With PATCH, shows what that patch is for and which attributes it replaces.
Imports the libraries.

Exit code: 0 all well, or OFF: switched off on purpose; 1 a library is missing,
too old or cannot be imported; or only:NAME names no patch; or a patch failed,
or drifted: its target is not as the patch expects; 2 invalid argument.  A patch
that is blocked, because another one that it requires was switched off, does not
count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import InputError, PatchStatus, State
from .. import status as status_of_patches
from ..errors import suggestion
from ..patches import load
from ..results.result import Result
from ..results.text import wrap
from ._command import Command


@dataclass(frozen=True)
class One(Result):
    patch: PatchStatus

    @property
    def ok(self) -> bool:
        return self.patch.ok and self.patch.state is not State.DISABLED

    @property
    def exit_code(self) -> int:
        return 0 if self.patch.ok else 1

    @property
    def verdict(self) -> str:
        return str(self.patch.state)

    def as_dict(self) -> dict[str, Any]:
        return self.patch.as_dict()

    def _lines(self) -> Iterator[str]:
        yield f"{self.patch.name}: {self.verdict}"
        yield ""
        yield wrap(self.patch.symptom, " " * 9, "symptom: ")
        if self.patch.reason:
            yield wrap(self.patch.reason, " " * 9, "reason:  ")
        if self.patch.replaces:
            yield from ("", "replaces", *(f"  {name}" for name in self.patch.replaces))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patch", metavar="PATCH", nargs="?", help="show this patch alone")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every patch")


def _run(options: argparse.Namespace) -> Result:
    names = [patch.name for patch in load()]
    if options.patch is not None and options.patch not in names:
        hint = suggestion(options.patch, names)
        raise InputError(f"no patch is named {options.patch!r}{hint}: status -v lists all")
    patches = status_of_patches(import_targets=True)
    if options.patch is not None:
        return One(patches[options.patch])
    patches.every = options.verbose
    return patches


COMMAND = Command("status", __doc__, _arguments, _run)
