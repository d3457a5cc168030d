"""``gemma4-compat map``."""

from __future__ import annotations

import argparse
import json
import sys

from ._libraries import quiet_libraries, require_libraries

_HELP = """\
Check a device map before loading: unknown names, what is not covered, what
lands where in bytes, what offloading saves on the GPU, and the traps, each with
the patch that takes care of it.

Reads MODEL_DIR/config.json and no weights, and needs no GPU.  What a map puts
on the CPU is not quantised: that is transformers' design.

A map is for the base model's from_pretrained.  PEFT ignores a device_map, as an
adapter goes where the layers that it adapts compute.

Exit code: 0 fine; 1 the map does not work, or not as it seems; 2 an argument
cannot work.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "map",
        help="check a device map, before loading",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("model_dir", metavar="MODEL_DIR", help="a folder with config.json")
    check.add_argument(
        "--map",
        required=True,
        metavar="JSON",
        dest="device_map",
        help="""as in '{"model.vision_tower": "cpu", "": 0}'""",
    )
    check.add_argument(
        "--offload-folder", metavar="DIR", help="as you give it to from_pretrained, for the disk"
    )
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    if (code := require_libraries("map", ("torch", "transformers"))) is not None:
        return code
    from ..errors import InputError
    from ..inspection.device_map import check_device_map, parse_map

    try:
        try:
            device_map = parse_map(options.device_map)
        except InputError as error:
            raise InputError(f"--map: {error}") from None
        with quiet_libraries():
            found = check_device_map(
                options.model_dir, device_map, offload_folder=options.offload_folder
            )
    except InputError as error:
        print(f"gemma4-compat map: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_dict(), indent=2) if options.json else found)
    return 0 if found.ok else 1
