"""The command line: ``gemma4-compat status``, ``run``, ``merge`` and ``demo``.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import logging
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import PatchError, Status, __version__, _engine, launcher
from .engine.gate import installed_version

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")

_RUN_HELP = """\
Run a Python program with the patches in place, without editing it:

  gemma4-compat run train.py --epochs 3
  gemma4-compat run -m package.train --epochs 3
  torchrun --nproc-per-node 2 -m gemma4_compat run train.py --epochs 3
  accelerate launch -m gemma4_compat run train.py --epochs 3

Everything after the program's name belongs to the program.  Processes that it starts with
multiprocessing (fork, spawn or forkserver) are patched as well; Python programs that it starts
by other means (subprocess, os.exec...) are not, unless they import gemma4_compat themselves.
"""

_MERGE_HELP = """\
Merge an adapter into its base model, and write the result as a checkpoint.

Adapters trained on a 4-bit base (QLoRA) are best merged into the unquantised one: name that as
BASE.  It is loaded once, in --dtype, and the adapter is merged in place.  The merged model's
logits and greedy tokens are compared with those of the model with the adapter loaded, for text
and for a synthetic image and sound where the model takes them; what is written is loaded again and
compared with the merged model.  OUT appears only if all of that agrees, and then complete, with
the tokenizer and processor of BASE, or of ADAPTER where it has its own.

Exit code: 0 merged and written; 1 the merged model disagrees or merging failed, nothing written;
2 an argument cannot work, nothing loaded.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    argv, program = _split_program(argv)
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command == "run":
        if not program:
            parser.error("run: name a script, or a module after -m")
        return launcher.run(program, as_module=options.module)
    if options.command == "demo":
        return _demo(options.keep, options.json)
    if options.command == "merge":
        return _merge(options)
    return _status(options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gemma4-compat",
        description="Makes Gemma 4 work with transformers, accelerate, peft and bitsandbytes.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    status = commands.add_parser(
        "status",
        help="which patches apply to the installed libraries",
        description="Show every patch, its state here and why.  Imports the libraries.  The exit "
        "code is 1 where a patch failed, or stepped aside because its target changed shape.",
    )
    status.add_argument("--json", action="store_true", help="print JSON")

    run = commands.add_parser(
        "run",
        help="run a script or module with the patches in place",
        usage="gemma4-compat run [-h] {SCRIPT | -m MODULE} [ARG ...]",
        description=_RUN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("-m", dest="module", action="store_true", help="run a module, not a file")

    merge = commands.add_parser(
        "merge",
        help="merge an adapter into its unquantised base model, with proof",
        description=_MERGE_HELP,
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

    demo = commands.add_parser(
        "demo",
        help="try it on a tiny random Gemma 4: without and with the patches",
        description="Build a tiny random Gemma 4 and play users' stories on it, each in a process "
        "without the patches and in one with them.  Downloads nothing; takes a minute or two.",
    )
    demo.add_argument("--keep", metavar="DIR", help="keep checkpoint, adapters and logs in DIR")
    demo.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _split_program(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the program to run with its.

    argparse would look for our options among the program's, and each Python version treats "--"
    differently.
    """
    if argv[:1] != ["run"]:
        return argv, []
    for index, argument in enumerate(argv[1:], start=1):
        if argument == "--":
            return argv[:index], argv[index + 1 :]
        if not argument.startswith("-"):
            return argv[:index], argv[index:]
    return argv, []


# -- status -------------------------------------------------------------------------------------


def _status(as_json: bool) -> int:
    try:
        with _quiet_libraries():
            status = _engine.import_targets()
    except PatchError as error:  # the strict switch is on
        print(f"gemma4-compat: {error}", file=sys.stderr)
        return 1
    versions = _versions()
    if as_json:
        found = {
            "version": __version__,
            "healthy": status.healthy,
            "libraries": versions,
            "patches": status.as_dict(),
        }
        print(json.dumps(found, indent=2))
    else:
        print(f"gemma4-compat {__version__}\n")
        for name, version in versions.items():
            print(f"{name:<12}  {version or 'not installed'}")
        print(f"\n{_patch_table(status, shutil.get_terminal_size().columns)}")
    return 0 if status.healthy else 1


def _patch_table(status: Status, columns: int) -> str:
    """As ``str(status)``, with the reasons wrapped."""
    name = max((len(entry.name) for entry in status), default=0)
    state = max((len(entry.state.value) for entry in status), default=0)
    lines = []
    for entry in status:
        head = f"{entry.name:<{name}}  {entry.state.value:<{state}}"
        for line in textwrap.wrap(entry.reason, max(columns - len(head) - 2, 24)) or [""]:
            lines.append(f"{head}  {line}".rstrip())
            head = " " * len(head)
    return "\n".join(lines)


def _versions() -> dict[str, str | None]:
    """The installed versions of the libraries that matter; ``None`` for those not installed."""
    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = installed_version(name) or "unknown version"
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep what the libraries say on import off the terminal, but not what we say."""
    handler = logging.StreamHandler()
    handler.addFilter(logging.Filter(__package__))
    root = logging.getLogger()
    root.addHandler(handler)
    # transformers reads its verbosity once, on import, and has a handler of its own.
    verbosity = os.environ.get("TRANSFORMERS_VERBOSITY")
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(handler)
        if verbosity is None:
            del os.environ["TRANSFORMERS_VERBOSITY"]
        else:
            os.environ["TRANSFORMERS_VERBOSITY"] = verbosity


# -- merge --------------------------------------------------------------------------------------


def _merge(options: argparse.Namespace) -> int:
    if (code := _require_libraries("merge", ("torch", "transformers", "peft"))) is not None:
        return code
    from .merge import MergeError, UsageError, merge_adapter

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
    except UsageError as error:
        print(f"gemma4-compat merge: {error}", file=sys.stderr)
        return 2
    except (MergeError, OSError, RuntimeError) as error:
        if isinstance(error, MergeError) and error.result is not None:
            print(f"{error.result}\n")
        print(f"gemma4-compat merge: {error}; nothing written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gemma4-compat merge: interrupted; nothing written", file=sys.stderr)
        return 130
    print(f"{result}\n\nmerged into {result.out}")
    return 0


# -- demo ---------------------------------------------------------------------------------------


def _demo(keep: str | None, as_json: bool) -> int:
    if (code := _require_libraries("demo", LIBRARIES)) is not None:
        return code
    from .demo.play import demo
    from .demo.stories import STORIES

    try:
        return demo(STORIES, keep=Path(keep) if keep else None, as_json=as_json)
    except KeyboardInterrupt:
        return 130


def _require_libraries(command: str, names: Sequence[str]) -> int | None:
    """The exit code where a library is missing, which is said."""
    versions = _versions()
    missing = [name for name in names if versions[name] is None]
    if not missing:
        return None
    print(
        f'gemma4-compat {command} needs {", ".join(missing)}: pip install "gemma4-compat[gemma4]"',
        file=sys.stderr,
    )
    return 2
