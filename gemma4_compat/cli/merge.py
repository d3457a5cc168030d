"""``gemma4-compat merge``."""

from __future__ import annotations

import argparse
import sys

from ._libraries import require_libraries

_HELP = """\
Merge an adapter into its base model, and write the result as a checkpoint.

Adapters trained on a 4-bit base (QLoRA) are best merged into the unquantised one: name that as
BASE.  It is loaded once, in --dtype, and the adapter is merged in place.  The merged model's
logits and greedy tokens are compared with those of the model with the adapter loaded, for text
and for a synthetic image and sound where the model takes them; what is written is loaded again and
compared with the merged model.  OUT appears only if all of that agrees, and then complete, with
the tokenizer and processor of BASE, or of ADAPTER where it has its own.

Exit code: 0 merged and written; 1 the merged model disagrees or merging failed, nothing written;
2 a file or an argument cannot work, or the adapter does not fit, nothing loaded.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    merge = commands.add_parser(
        "merge",
        help="merge an adapter into its unquantised base model, with proof",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    merge.add_argument("base", metavar="BASE", help="the base model's folder or Hub id")
    merge.add_argument("adapter", metavar="ADAPTER", help="the adapter's folder or Hub id")
    merge.add_argument("out", metavar="OUT", help="the folder to write")
    merge.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="of computing and of what is written (default: bfloat16)",
    )
    merge.add_argument(
        "--prompt",
        metavar="TEXT",
        dest="prompts",
        action="append",
        default=[],
        help="compare the answers to this text, in place of ours (may be given several times)",
    )
    merge.add_argument(
        "--device", default="cpu", help="where to compute: cpu (default), cuda, cuda:1, ..."
    )
    merge.add_argument("--force", action="store_true", help="replace an existing OUT")
    merge.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    if (code := require_libraries("merge", ("torch", "transformers", "peft"))) is not None:
        return code
    from ..errors import InputError, MergeError
    from ..merge import merge_adapter

    try:
        result = merge_adapter(
            options.base,
            options.adapter,
            options.out,
            dtype=options.dtype,
            prompts=options.prompts,
            device=options.device,
            force=options.force,
            progress=lambda step: print(f"{step} ...", file=sys.stderr, flush=True),
        )
    except InputError as error:
        print(f"gemma4-compat merge: {error}", file=sys.stderr)
        return 2
    except MergeError as error:
        if error.result is not None:
            print(f"{error.result}\n")
        print(f"gemma4-compat merge: {error}; nothing written", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit) as stopped:
        print("gemma4-compat merge: interrupted; nothing written", file=sys.stderr)
        return 130 if isinstance(stopped, KeyboardInterrupt) else int(stopped.code or 1)
    print(f"{result}\n\nmerged into {result.out}")
    return 0
