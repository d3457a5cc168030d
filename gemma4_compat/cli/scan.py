"""``gemma4-compat scan``."""

from __future__ import annotations

import argparse
import json
import sys

from ._libraries import quiet_libraries, require_libraries

_HELP = """\
Show which modules of a model an adapter's target_modules match, before making
the adapter.

Reads MODEL_DIR/config.json and no weights.  Matched is as PEFT does it, where it
is installed.  --targets is a list of names (q_proj,v_proj), a regular expression,
or all-linear.  Shown are the matched modules by tower and class, the patch that
they need, and a LoRA adapter's size.

Exit code: 0 PEFT takes them, with the patches that are named; 1 nothing is
matched, or a class that LoRA cannot adapt; 2 an argument cannot work.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    scan = commands.add_parser(
        "scan",
        help="which modules an adapter's target_modules match",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scan.add_argument("model_dir", metavar="MODEL_DIR", help="a folder with config.json")
    scan.add_argument(
        "--targets",
        required=True,
        metavar="TARGETS",
        help="as in q_proj,v_proj or '.*language_model.*_proj' or all-linear",
    )
    scan.add_argument("--rank", type=int, default=16, metavar="R", help="of LoRA (default: 16)")
    scan.add_argument("--json", action="store_true", help="print JSON")
    scan.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    if (code := require_libraries("scan", ("torch", "transformers"))) is not None:
        return code
    from ..errors import InputError
    from ..inspection.targets import parse_targets, scan_targets

    try:
        with quiet_libraries():
            found = scan_targets(
                options.model_dir, parse_targets(options.targets), rank=options.rank
            )
    except InputError as error:
        print(f"gemma4-compat scan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_dict(), indent=2) if options.json else found)
    return 0 if found.works else 1
