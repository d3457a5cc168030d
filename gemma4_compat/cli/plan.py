"""``gemma4-compat plan``."""

from __future__ import annotations

import argparse

from ..model.meta import QUANTS
from ..plan import parse_gpu, parse_size, plan
from ..result import Result
from ._arguments import adapter_location, add_model_dir, argument, at_least_one
from ._command import Command
from ._libraries import quiet_libraries

_HELP = """\
Plan a model for a GPU: the memory that it needs, and code that loads it.

Reads config.json and no weights.  Prints the bytes of each part of the model
and of the KV cache at --context, a device map that offloads the least, as
Python to paste, and what else could be offloaded.  The per-layer embeddings go
to the CPU in any case, since that costs little.  If that is not enough, vision
and audio follow, then decoder layers.

  gemma4-compat plan gemma-4-E4B-it
  gemma4-compat plan gemma-4-E4B-it --gpu 12GiB --context 65536
  gemma4-compat plan gemma-4-E4B-it --gpu "RTX 4070" --train
  gemma4-compat plan gemma-4-31B-it --gpu "RTX 3090" --gpu 12GiB

"loaded" is what torch.cuda.memory_allocated() returns after loading.
Activations are an estimate, for text, and for a prompt that is read 2048 tokens
at a time: generate(prefill_chunk_size=2048).

Exit code: 0 it fits; 1 it cannot fit; 2 invalid argument or file.
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model_dir(parser)
    parser.add_argument(
        "--gpu",
        action="append",
        metavar="SIZE",
        type=argument(parse_gpu),
        help="memory such as 12GiB or 12GB (decimal), or a card such as 'RTX 4070'; once for each "
        "GPU (default: the GPUs of this machine, with the memory that is free now)",
    )
    parser.add_argument(
        "--reserve",
        default=0,
        metavar="SIZE",
        type=argument(parse_size),
        help="memory of the first GPU to leave to other programs, such as the desktop",
    )
    parser.add_argument(
        "--ram",
        metavar="SIZE",
        type=argument(parse_size),
        help="CPU memory that the model may use (default: what is free, without --gpu)",
    )
    parser.add_argument(
        "--quant",
        choices=QUANTS,
        help="the default is nf4, with double quantisation",
    )
    parser.add_argument(
        "--context",
        type=argument(at_least_one),
        metavar="TOKENS",
        help="prompt and answer together (default: 32768), or a sequence to train on (2048)",
    )
    parser.add_argument(
        "--adapter",
        metavar="ADAPTER",
        type=argument(adapter_location),
        help="the folder or Hub id of a PEFT adapter to load as well",
    )
    parser.add_argument(
        "--train",
        action="store_true",
        help="plan a training step: of the adapter, or of LoRA on all linear layers of the decoder",
    )
    parser.add_argument(
        "--rank",
        default=16,
        type=argument(at_least_one),
        metavar="R",
        help="with --train and without --adapter, the rank of LoRA (default: 16)",
    )
    parser.add_argument(
        "--keep-ple",
        action="store_true",
        help="leave the per-layer embeddings on the GPU if they fit",
    )


def _needs(options: argparse.Namespace) -> tuple[str, ...]:
    quantisers = () if options.quant == "bf16" else ("accelerate", "bitsandbytes")
    adapts = ("peft",) if options.train or options.adapter is not None else ()
    return ("torch", "transformers", *quantisers, *adapts)


def _run(options: argparse.Namespace) -> Result:
    with quiet_libraries():
        return plan(
            options.model_dir,
            options.gpu,
            quant=options.quant,
            context=options.context,
            adapter=options.adapter,
            train=options.train,
            rank=options.rank,
            reserve=options.reserve,
            ram=options.ram,
            keep_ple=options.keep_ple,
        )


COMMAND = Command(
    name="plan",
    help="what fits on a GPU, and the device map for it",
    description=_HELP,
    arguments=_arguments,
    needs=_needs,
    run=_run,
)
