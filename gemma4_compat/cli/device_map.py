"""``gemma4-compat map``."""

from __future__ import annotations

import argparse

from ..result import Result
from ._arguments import MAP_HELP, add_map, add_model_dir
from ._command import Command
from ._libraries import quiet_libraries

_HELP = f"""\
Check a device map before loading: names that the model does not have, modules
without an entry, the bytes on each device, what offloading saves on the GPU,
and known problems that have no patch.

Reads config.json and no weights, and needs no GPU.  Modules that a map puts on
the CPU are not quantised: that is transformers' design.

A map is for the base model's from_pretrained.  PEFT ignores a device_map: an
adapter is put on the execution device of the layers that it adapts.

{MAP_HELP}
Exit code: 0 the map works; 1 it does not work, or not as expected; 2 invalid
argument or file.
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model_dir(parser)
    add_map(parser, required=True, help="KEY=DEVICE, JSON or a file: see above")


def _run(options: argparse.Namespace) -> Result:
    from ..inspection.device_map import check_device_map

    with quiet_libraries():
        return check_device_map(options.model_dir, dict(options.device_map))


COMMAND = Command(
    name="map",
    help="check a device map, before loading",
    description=_HELP,
    arguments=_arguments,
    needs=lambda options: ("torch", "transformers"),
    run=_run,
)
