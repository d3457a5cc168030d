"""Merge an adapter into its base model, and check the result.

If the adapter was trained on a 4-bit base (QLoRA), name the unquantized model
as BASE.  It is loaded once, in bfloat16, and the adapter is merged in place.
Logits and greedy tokens of the merged model are compared with those of the
model with the adapter loaded, for text, and for a synthetic image and sound if
the model accepts them.  OUT appears only if they agree, and if what was written
is the merged model.  It is complete, with the tokenizer and processor of BASE,
or of ADAPTER if it has its own.

The device and the disk need room for the weights: E2B 9.5 GiB, E4B 14.8 GiB.

Exit code: 0 merged and written; 1 the merged model disagrees or merging failed,
nothing was written; 2 invalid argument or file, or the adapter does not fit,
no weights were loaded; 130 interrupted, nothing was written.
"""

from __future__ import annotations

import argparse
import sys

from ..results.result import Result
from ._command import PEFT, Command


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="the base model's folder or Hub id")
    parser.add_argument("adapter", metavar="ADAPTER", help="the adapter's folder or Hub id")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    help = "where to compute: cpu (default), cuda, cuda:1, ..."
    parser.add_argument("--device", default="cpu", help=help)
    parser.add_argument("--force", action="store_true", help="replace an existing OUT")


def _run(options: argparse.Namespace) -> Result:
    from ..merging import merge

    return merge(
        options.base,
        options.adapter,
        options.out,
        device=options.device,
        force=options.force,
        progress=_show,
    )


def _show(step: str) -> None:
    print(step if step.endswith(".") else f"{step} ...", file=sys.stderr, flush=True)


COMMAND = Command("merge", __doc__, _arguments, _run, needs=PEFT, stopped="; nothing was written")
