"""``gemma4-compat status``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap

from .. import PatchError, Status, __version__
from .. import status as status_of_patches
from ..engine.gate import later
from ..versions import NEWEST
from ._libraries import library_versions, quiet_libraries


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = commands.add_parser(
        "status",
        help="which patches apply to the installed libraries",
        description="Show every patch, its state here and why.  Imports the libraries.  The exit "
        "code is 1 where a patch failed, or stepped aside because its target changed shape; not "
        "where one is blocked, because another that it requires was switched off.",
    )
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    try:
        with quiet_libraries():
            status = status_of_patches(import_targets=True)
    except PatchError as error:  # the strict switch is on
        print(f"gemma4-compat: {error}", file=sys.stderr)
        return 1
    versions = library_versions()
    untested = later(versions, NEWEST)
    if options.json:
        found = {
            "version": __version__,
            "healthy": status.healthy,
            "libraries": versions,
            "untested": untested,
            "patches": status.as_dict(),
        }
        print(json.dumps(found, indent=2))
    else:
        print(f"gemma4-compat {__version__}\n")
        for name, version in versions.items():
            print(f"{name:<12}  {version or 'not installed'}")
        for release in untested:
            print(f"\nuntested version: {release}; what its code shows decides on each patch")
        print(f"\n{_patch_table(status, shutil.get_terminal_size().columns)}")
    return 0 if status.healthy else 1


def _patch_table(status: Status, columns: int) -> str:
    """As ``str(status)``, with the reasons wrapped."""
    name = max((len(entry.name) for entry in status), default=0)
    state = max((len(entry.state.value) for entry in status), default=0)
    lines = []
    for entry in status:
        head = f"{entry.name:<{name}}  {entry.state.value:<{state}}"
        for line in textwrap.wrap(entry.reason, max(columns - len(head) - 2, 24)) or [""]:
            lines.append(f"{head}  {line}".rstrip())
            head = " " * len(head)
    return "\n".join(lines)
