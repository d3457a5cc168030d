"""Plan a model for a GPU, and print code that loads it.

Reads config.json and no weights.  Prints the bytes of each part of the model
and of the KV cache at --context, and Python code with a device map that
offloads the least.  The per-layer embeddings go to the CPU in any case, since
that costs little.  If that is not enough, vision and audio follow, then decoder
layers.

  gemma4-compat plan gemma-4-E4B-it --gpu 12GiB --context 65536
  gemma4-compat plan gemma-4-E4B-it --gpu "RTX 4070" --train
  gemma4-compat plan gemma-4-31B-it --gpu "RTX 3090" --gpu 12GiB

Activations are an estimate, for text.  The plan is for a static cache, and for a
prompt that is read 2048 tokens at a time:
generate(cache_implementation="static", prefill_chunk_size=2048).

Exit code: 0 it fits; 1 it cannot fit; 2 invalid argument or file.
"""

from __future__ import annotations

import argparse

from ..errors import InputError
from ..model.meta import QUANTS
from ..planning import parse_gpu, parse_size, plan
from ..results.result import Result
from ..versions import WITH_TORCH
from ._arguments import add_adapter, add_model, add_rank, argument, at_least_one
from ._command import Command


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--gpu",
        action="append",
        metavar="SIZE",
        type=argument(parse_gpu),
        help="memory such as 12GiB or 12GB (decimal), or a card such as 'RTX 4070'; once for each "
        "GPU (default: the GPUs of this machine, with the memory that is free now)",
    )
    size = argument(parse_size)
    help = "memory of the first GPU to leave to other programs, such as the desktop"
    parser.add_argument("--reserve", type=size, default=0, metavar="SIZE", help=help)
    help = "CPU memory that the model may use (default: what is free, without --gpu)"
    parser.add_argument("--ram", type=size, metavar="SIZE", help=help)
    help = "the default is nf4, with double quantization"
    parser.add_argument("--quant", choices=QUANTS, help=help)
    help = "prompt and answer together (default: 32768), or a sequence to train on (2048)"
    parser.add_argument("--context", type=at_least_one, metavar="TOKENS", help=help)
    add_adapter(parser)
    help = "plan a training step: of the adapter, or of LoRA on all linear layers of the decoder"
    parser.add_argument("--train", action="store_true", help=help)
    add_rank(parser)
    parser.set_defaults(rank=None)
    help = "leave the per-layer embeddings on the GPU if they fit"
    parser.add_argument("--keep-ple", action="store_true", help=help)


def _needs(options: argparse.Namespace) -> tuple[str, ...]:
    needless = {"accelerate", "bitsandbytes"} if options.quant == "bf16" else set()
    if not options.train and options.adapter is None:
        needless.add("peft")
    return tuple(name for name in WITH_TORCH if name not in needless)


def _run(options: argparse.Namespace) -> Result:
    if options.rank is not None and (options.adapter or not options.train):
        raise InputError("--rank is that of a new adapter: it needs --train, and no --adapter")
    return plan(
        options.model_dir,
        options.gpu,
        quant=options.quant,
        context=options.context,
        adapter=options.adapter,
        train=options.train,
        rank=options.rank or 16,
        reserve=options.reserve,
        ram=options.ram,
        keep_ple=options.keep_ple,
    )


COMMAND = Command("plan", __doc__, _arguments, _run, needs=_needs)
