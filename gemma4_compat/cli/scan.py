"""Show which modules an adapter's target_modules match.

Reads config.json and no weights.  PEFT itself matches the names.  --targets is
a list of names (q_proj,v_proj), a regular expression, or all-linear.  Prints
the matched modules by tower and class, the patch that they need, and a LoRA
adapter's size.

Exit code: 0 PEFT accepts the targets, with the named patches; 1 no module
matches, or LoRA cannot adapt a matched module; 2 invalid argument or file.
"""

from __future__ import annotations

import argparse
import re

from ..results.result import Result
from ._arguments import add_model, add_rank, argument
from ._command import PEFT, Command


def _targets(text: str) -> str | tuple[str, ...]:
    """Plain names with commas between them are a list, other texts a regular expression."""
    from ..inspection.targets import check_expression

    text = text.strip()
    if text != "all-linear" and re.fullmatch(r"[\w.-]+(\s*,\s*[\w.-]+)*", text):
        return tuple(name.strip() for name in text.split(","))
    check_expression(text)
    return text


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    help = "such as q_proj,v_proj or '.*language_model.*_proj' or all-linear"
    parser.add_argument("--targets", required=True, type=argument(_targets), help=help)
    add_rank(parser)


def _run(options: argparse.Namespace) -> Result:
    from ..inspection.targets import scan_targets

    return scan_targets(options.model_dir, options.targets, rank=options.rank)


COMMAND = Command("scan", __doc__, _arguments, _run, needs=PEFT)
