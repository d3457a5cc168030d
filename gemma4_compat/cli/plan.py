"""``gemma4-compat plan``."""

from __future__ import annotations

import argparse

from ..result import Result
from ._arguments import adapter_location, add_model_dir, argument, at_least_one
from ._command import Command
from ._libraries import quiet_libraries

_HELP = """\
Plan a model for a GPU: the memory that it needs, and code that loads it.

Reads config.json and no weights, and needs no GPU.  Prints the bytes
of each part of the model and of the KV cache at --context, a device map that
offloads the least, as Python to paste, and what else could be offloaded.
The per-layer embeddings are offloaded first, then vision and audio, then
decoder layers.

"loaded" is what torch.cuda.memory_allocated() returns after loading.
Activations are an estimate, for text, and for a prompt that is read 2048 tokens
at a time: generate(prefill_chunk_size=2048).

Exit code: 0 it fits; 1 it cannot fit; 2 invalid argument or file.
"""


def _size(text: str) -> int:
    from ..plan import parse_size

    return parse_size(text)


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model_dir(parser)
    parser.add_argument(
        "--gpu", required=True, metavar="SIZE", type=argument(_size), help="such as 12GiB or 12GB"
    )
    parser.add_argument(
        "--quant",
        default="nf4",
        choices=("nf4", "int8", "bf16"),
        help="of the weights on the GPU (default: nf4, with double quantisation)",
    )
    parser.add_argument(
        "--context",
        type=argument(at_least_one),
        default=32768,
        metavar="TOKENS",
        help="prompt and answer together (default: 32768)",
    )
    parser.add_argument(
        "--adapter",
        metavar="ADAPTER",
        type=argument(adapter_location),
        help="the folder or Hub id of a PEFT adapter to load as well",
    )


def _needs(options: argparse.Namespace) -> tuple[str, ...]:
    quantisers = () if options.quant == "bf16" else ("accelerate", "bitsandbytes")
    return ("torch", "transformers", *quantisers)


def _run(options: argparse.Namespace) -> Result:
    from ..plan import plan

    with quiet_libraries():
        return plan(
            options.model_dir,
            options.gpu,
            quant=options.quant,
            context=options.context,
            adapter=options.adapter,
        )


COMMAND = Command(
    name="plan",
    help="what fits on a GPU, and the device map for it",
    description=_HELP,
    arguments=_arguments,
    needs=_needs,
    run=_run,
)
