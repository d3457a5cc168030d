"""Print what to paste into an issue, without private data.

This is Markdown: system, GPUs, driver, versions, the state of each patch, and
facts about a model, a device map and an adapter, from their headers.  Paths are
reduced to their last component, and user and host name, home folder and tokens
are removed.  Read it before you post it all the same.

Exit code: 0 printed; 1 a patch failed, in strict mode; 2 invalid argument or
file.
"""

from __future__ import annotations

import argparse

from ..errors import InputError
from ..results.result import Result
from ._arguments import add_adapter, add_map, add_model
from ._command import Command


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--model")
    add_adapter(parser)
    add_map(parser, required=False)


def _run(options: argparse.Namespace) -> Result:
    from ..inspection.report import build_report

    if options.map is not None and options.model is None:
        raise InputError("--map is checked against a model: name it with --model")
    device_map = None if options.map is None else dict(options.map)
    return build_report(options.model, options.adapter, device_map)


COMMAND = Command("report", __doc__, _arguments, _run)
