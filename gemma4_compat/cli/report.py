"""``gemma4-compat report``."""

from __future__ import annotations

import argparse

from ..errors import InputError
from ..result import Result
from ._arguments import MODEL_HELP, adapter_location, add_map, argument, model_location
from ._command import Command
from ._libraries import quiet_libraries

_HELP = """\
Print what an upstream issue asks for, as Markdown to paste: system, GPUs,
driver, versions, the state of each patch, and facts about a model, a device map
and an adapter, from their headers.

It contains nothing private: paths are reduced to their last component, and user
and host name, home folder and tokens are removed.  Read it before you post it
all the same.

Exit code: 0 printed; 1 a patch failed, in strict mode; 2 invalid argument or
file.
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", type=argument(model_location), help=MODEL_HELP)
    parser.add_argument(
        "--adapter",
        metavar="ADAPTER",
        type=argument(adapter_location),
        help="an adapter's folder, safetensors file or Hub id",
    )
    add_map(
        parser,
        required=False,
        help="a device map to check against --model, as in gemma4-compat map",
    )


def _needs(options: argparse.Namespace) -> tuple[str, ...]:
    with_map = ("torch", "transformers") if options.device_map is not None else ()
    with_both = ("torch", "transformers", "peft") if options.model and options.adapter else ()
    return with_both or with_map


def _run(options: argparse.Namespace) -> Result:
    if options.device_map is not None and options.model is None:
        raise InputError("--map is checked against a model: name it with --model")
    with quiet_libraries():
        from ..inspection.report import build_report

        mapped = dict(options.device_map) if options.device_map else None
        return build_report(options.model, options.adapter, mapped)


COMMAND = Command(
    name="report",
    help="what to paste into an issue, with nothing private in it",
    description=_HELP,
    arguments=_arguments,
    needs=_needs,
    run=_run,
)
