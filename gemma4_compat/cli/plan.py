"""``gemma4-compat plan``."""

from __future__ import annotations

import argparse
import json
import sys

from ._libraries import quiet_libraries, require_libraries

_HELP = """\
Plan a model for a GPU: what it needs, and the code that loads it so.

Reads MODEL_DIR/config.json and no weights, and needs no GPU.  Printed are the bytes of each part of
the model, of the KV cache at --context, a device map that offloads the least, as Python to paste,
and what could be offloaded further.  Offloaded are first the per-layer embeddings, then vision and
sound, then decoder layers.

"loaded" is what torch.cuda.memory_allocated() says after loading.  Activations are an estimate,
for text, and for a prompt that is read 2048 tokens at a time: generate(prefill_chunk_size=2048).

Exit code: 0 it fits; 1 it cannot fit; 2 an argument cannot work.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="what fits on a GPU, and the device map for it",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("model_dir", metavar="MODEL_DIR", help="a folder with config.json")
    plan.add_argument("--gpu", required=True, metavar="SIZE", help="as in 12GiB or 12GB")
    plan.add_argument(
        "--quant",
        default="nf4",
        choices=("nf4", "int8", "bf16"),
        help="of what stays on the GPU (default: nf4, with double quantisation)",
    )
    plan.add_argument(
        "--context",
        type=int,
        default=32768,
        metavar="TOKENS",
        help="prompt and answer together (default: 32768)",
    )
    plan.add_argument("--adapter", metavar="DIR", help="the folder of a PEFT adapter to load too")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    needed = ["torch", "transformers"]
    if options.quant != "bf16":
        needed += ["accelerate", "bitsandbytes"]
    if (code := require_libraries("plan", needed)) is not None:
        return code
    from ..errors import InputError
    from ..plan import parse_size, plan

    try:
        try:
            gpu = parse_size(options.gpu)
        except InputError as error:
            raise InputError(f"--gpu: {error}") from None
        with quiet_libraries():
            found = plan(
                options.model_dir,
                gpu,
                quant=options.quant,
                context=options.context,
                adapter=options.adapter,
            )
    except InputError as error:
        print(f"gemma4-compat plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_dict(), indent=2) if options.json else found)
    return 0 if found.fits else 1
