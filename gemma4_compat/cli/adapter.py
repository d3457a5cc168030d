"""Show what an adapter contains, and whether it fits a model.

Reads the header of adapter_model.safetensors and adapter_config.json, and no
tensor.  With --model, also reads the model's config.json, compares the tensors'
names and shapes with those that PEFT creates for this model, and reads whether
all lora_B of a file on this disk are 0.

Exit code: 0 the adapter was read, and with --model it loads completely, with
the named patches or options; 1 it does not fit the model, or only in part; 2
invalid argument or file.
"""

from __future__ import annotations

import argparse

from ..results.result import Result
from ._arguments import add_adapter, add_model
from ._command import PEFT, Command


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_adapter(parser, "adapter")
    add_model(parser, "--model")


def _needs(options: argparse.Namespace) -> tuple[str, ...]:
    return () if options.model is None else PEFT


def _run(options: argparse.Namespace) -> Result:
    from ..inspection.adapter import inspect_adapter

    return inspect_adapter(options.adapter, options.model)


COMMAND = Command("adapter", __doc__, _arguments, _run, needs=_needs)
