"""``gemma4-compat adapter``."""

from __future__ import annotations

import argparse
import json
import sys

from ._colour import coloured
from ._libraries import quiet_libraries, require_libraries

_HELP = """\
Show what an adapter holds, and with --model what of it would load there.

Reads the header of adapter_model.safetensors and adapter_config.json, and no
tensor.  With --model also MODEL_DIR/config.json: the tensors' names and widths
are compared with the model's, and target_modules are matched as PEFT does it.

Exit code: 0 read, and with --model all that has an effect loads, with the
patches that are named; 1 it does not fit the model, or not all of it; 2 an
argument cannot work.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    adapter = commands.add_parser(
        "adapter",
        help="what an adapter holds, and whether it fits a model",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    adapter.add_argument("path", metavar="ADAPTER", help="its folder, or its safetensors file")
    adapter.add_argument("--model", metavar="MODEL_DIR", help="a folder with config.json")
    adapter.add_argument("--json", action="store_true", help="print JSON")
    adapter.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    if options.model is not None:
        if (code := require_libraries("adapter --model", ("torch", "transformers"))) is not None:
            return code
    from ..errors import InputError
    from ..inspection.adapter import inspect_adapter

    try:
        with quiet_libraries():
            found = inspect_adapter(options.path, options.model)
    except InputError as error:
        print(f"gemma4-compat adapter: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    elif found.fit is None:
        print(found)
    else:
        verdict = found.fit.verdict
        colour = "green" if found.fit.fits else "red"
        print(str(found).replace(verdict, coloured(verdict, colour)))
    return 0 if found.fit is None or found.fit.fits else 1
