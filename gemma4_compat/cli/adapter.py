"""``gemma4-compat adapter``."""

from __future__ import annotations

import argparse

from ..result import Result
from ._arguments import MODEL_HELP, adapter_location, argument, model_location
from ._command import Command
from ._libraries import quiet_libraries

_HELP = """\
Show what an adapter contains and, with --model, which of its tensors would load
onto that model.

Reads the header of adapter_model.safetensors and adapter_config.json, and no
tensor.  With --model, also reads the model's config.json, compares the tensors'
names and widths with the model's, and matches target_modules as PEFT does.  Of
a Hub id, only these files and the header are fetched.

Exit code: 0 the adapter was read, and with --model it loads completely, with
the named patches; 1 it does not fit the model, or only in part; 2 invalid
argument or file.
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="ADAPTER",
        type=argument(adapter_location),
        help="its folder, safetensors file or Hub id",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        type=argument(model_location),
        help=MODEL_HELP,
    )


def _run(options: argparse.Namespace) -> Result:
    from ..inspection.adapter import inspect_adapter

    with quiet_libraries():
        return inspect_adapter(options.path, options.model)


COMMAND = Command(
    name="adapter",
    help="what an adapter contains, and whether it fits a model",
    description=_HELP,
    arguments=_arguments,
    needs=lambda options: () if options.model is None else ("torch", "transformers", "peft"),
    run=_run,
)
