"""Show whether the patches are in place.

Names those that need attention; with -v every patch, its state here and why.
With PATCH, shows what that patch is for and which attributes it replaces.
Imports the libraries.

Exit code: 0 no patch failed; 1 a patch failed, or drifted: its target is not as
the patch expects; 2 invalid argument.  A patch that is blocked, because another
one that it requires was switched off, does not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import InputError, PatchStatus, State, Status, __version__
from .. import status as status_of_patches
from ..engine.gate import later
from ..errors import suggestion
from ..machine.torch_build import cpu_only
from ..result import Result
from ..text import table, wrap
from ..versions import NEWEST
from ._command import Command, library_versions

#: the states of patches that need no attention
_USUAL = (State.APPLIED, State.UNAFFECTED, State.FIXED, State.NOT_INSTALLED)


@dataclass(frozen=True)
class Overview(Result):
    """The libraries and the patches; ``untested`` lists versions newer than any measured one.

    ``note`` says what else is wrong here.  ``every`` shows all patches.
    """

    patches: Status
    libraries: Mapping[str, str | None]
    untested: tuple[str, ...]
    note: str = ""
    every: bool = False

    @property
    def ok(self) -> bool:
        return self.patches.ok

    @property
    def verdict(self) -> str:
        return self.patches.verdict

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "ok": self.ok,
            "libraries": dict(self.libraries),
            "untested": list(self.untested),
            "note": self.note,
            "patches": self.patches.as_dict(),
        }

    def __str__(self) -> str:
        return "\n\n".join(self._paragraphs())

    def _paragraphs(self) -> Iterator[str]:
        yield f"gemma4-compat {__version__}\n{self.verdict}"
        yield table([(name, v or "not installed") for name, v in self.libraries.items()])
        if missing := [name for name, version in self.libraries.items() if version is None]:
            yield wrap(f"not installed: {', '.join(missing)}; pip install {' '.join(missing)}")
        if self.note:
            yield wrap(self.note)
        for release in self.untested:
            yield wrap(
                f"untested version: {release} is newer than any measured one; the probe of each "
                "patch decides whether it is applied"
            )
        if self.every:
            yield wrap(
                "GEMMA4_COMPAT_NAME=0 turns a patch off, GEMMA4_COMPAT_SPEED=0 all that only make "
                "a model faster. inspect_model(model) says which of these are at work on it."
            )
        shown = [each for each in self.patches if self.every or each.state not in _USUAL]
        if shown:
            yield table([(each.name, each.state, each.reason) for each in shown])
        if not self.every:
            yield wrap("gemma4-compat status -v lists every patch; status PATCH explains one")


@dataclass(frozen=True)
class One(Result):
    """One patch."""

    patch: PatchStatus

    @property
    def ok(self) -> bool:
        return self.patch.ok

    @property
    def verdict(self) -> str:
        return str(self.patch.state)

    def as_dict(self) -> dict[str, Any]:
        return self.patch.as_dict()

    def __str__(self) -> str:
        patch = self.patch
        lines = [f"{patch.name}: {self.verdict}", "", wrap(patch.symptom, " " * 9, "symptom: ")]
        if patch.reason:
            lines.append(wrap(patch.reason, " " * 9, "reason:  "))
        if patch.replaces:
            lines += ["", "replaces", *(f"  {name}" for name in patch.replaces)]
        return "\n".join(lines)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patch", metavar="PATCH", nargs="?", help="show this patch alone")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every patch")


def _run(options: argparse.Namespace) -> Result:
    patches = status_of_patches(import_targets=True)
    if options.patch is not None:
        names = [entry.name for entry in patches]
        if options.patch not in names:
            hint = suggestion(options.patch, names)
            raise InputError(f"no patch is named {options.patch!r}{hint}: status lists all")
        return One(patches[options.patch])
    versions = library_versions()
    note = cpu_only() if "torch" in sys.modules else ""
    return Overview(patches, versions, tuple(later(versions, NEWEST)), note, options.verbose)


COMMAND = Command(
    name="status",
    description=__doc__,
    arguments=_arguments,
    run=_run,
)
