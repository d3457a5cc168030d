"""``gemma4-compat report``."""

from __future__ import annotations

import argparse
import json
import sys

from ._libraries import quiet_libraries, require_libraries

_HELP = """\
Print what an upstream issue asks for, as Markdown to paste: system, GPUs,
driver, versions, the state of each patch, and what a model, a device map and an
adapter are, from their headers.

Nothing private is in it: paths are reduced to their last component, and user
and host name, home folder and tokens are taken out.  Read it all the same
before you post it.

Exit code: 0; 1 in strict mode where a patch fails; 2 an argument cannot work.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "report",
        help="what to paste into an issue, with nothing private in it",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("--model", metavar="DIR", help="a checkpoint's folder")
    report.add_argument("--adapter", metavar="DIR", help="an adapter's folder or file")
    report.add_argument(
        "--map", metavar="JSON", dest="device_map", help="a device map, to check against --model"
    )
    report.add_argument("--json", action="store_true", help="print JSON")
    report.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    needed = ("torch", "transformers") if options.model is not None else ()
    if (code := require_libraries("report --model", needed)) is not None:
        return code
    from .. import PatchError
    from ..errors import InputError

    try:
        with quiet_libraries():
            from ..inspection.report import build_report

            device_map = None
            if options.device_map is not None:
                from ..inspection.device_map import parse_map

                if options.model is None:
                    raise InputError("--map: checked against a model: name one with --model")
                try:
                    device_map = parse_map(options.device_map)
                except InputError as error:
                    raise InputError(f"--map: {error}") from None
            found = build_report(options.model, options.adapter, device_map)
    except InputError as error:
        print(f"gemma4-compat report: {error}", file=sys.stderr)
        return 2
    except PatchError as error:  # the strict switch is on
        print(f"gemma4-compat report: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found.as_dict(), indent=2) if options.json else found)
    return 0
