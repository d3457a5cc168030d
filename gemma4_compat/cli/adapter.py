"""Show what an adapter contains, and whether it fits a model, in PEFT or in a server.

Reads the header of adapter_model.safetensors and adapter_config.json, and no
tensor.  With --model, also reads the model's config.json, compares the tensors'
names and widths with the model's, matches target_modules as PEFT does, and reads
whether all lora_B of a file on this disk are 0.
With --for vllm or sglang, says instead which tensors that server applies.

Exit code: 0 the adapter was read, and with --model it loads completely, with
the named patches or options; 1 it does not fit the model, or only in part; 2
invalid argument or file.
"""

from __future__ import annotations

import argparse

from ..errors import InputError
from ..result import Result
from ._arguments import add_adapter, add_model
from ._command import PEFT, Command


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_adapter(parser, "adapter")
    add_model(parser, "--model")
    help = "who loads the adapter (default: peft)"
    parser.add_argument(
        "--for", dest="loader", choices=("peft", "vllm", "sglang"), default="peft", help=help
    )
    help = "write a copy with the names and tensors that --for needs, and show how it fits"
    parser.add_argument("--export", metavar="FOLDER", help=help)


def _run(options: argparse.Namespace) -> Result:
    from ..inspection.adapter import inspect_adapter
    from ..inspection.served import check_served, export_for_peft

    if options.model is None and (options.export is not None or options.loader != "peft"):
        raise InputError("--for and --export need --model")
    if options.loader != "peft":
        return check_served(options.adapter, options.model, options.loader, export=options.export)
    if options.export is not None:
        export_for_peft(options.adapter, options.model, options.export)
        return inspect_adapter(options.export, options.model)
    return inspect_adapter(options.adapter, options.model)


COMMAND = Command(
    name="adapter",
    description=__doc__,
    arguments=_arguments,
    needs=lambda options: () if options.model is None else PEFT,
    run=_run,
)
