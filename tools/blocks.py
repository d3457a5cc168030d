"""Writes the output of commands into the documents.

    python tools/blocks.py [--check] PAGE ...

A ``text`` block shows what the commands of the ``console`` block above it print.  A comment in the
line before the ``text`` block can say more:

- ``<!-- run: REASON -->``: there is text between the two, or the figures depend on the machine.
- ``<!-- not run: REASON -->``: nothing runs it, for example because it needs a GPU.

The commands run without a GPU, in a temporary folder.  There ``gemma-4-E4B-it`` is a config.json of
the true shape; ``google/gemma-4-E4B-it`` and ``my-lora`` are the tiny model and its adapter.

``--check`` changes no file.  It prints what differs, except figures, and exits with 1.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gemma4_compat  # noqa: F401  (first: before the libraries that it patches)
from gemma4_compat import cli

BLOCK = re.compile(
    r"(?ms)^(?:<!-- (?P<mark>(?:not )?run): [^\n]+ -->\n)?"
    r"(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$"
)
#: What depends on the machine: the build of torch, and the paragraph on a torch without a GPU.
VARIES = {
    r"(?m)^(torch +\d[\d.]*)\+\w+$": r"\1",
    r"(?m)^torch \S+ is (a CPU-only build|built for CUDA)(.|\n)*?\n\n": "",
}


def fill(folder: Path) -> None:
    """Write the models that the commands name."""
    from gemma4_compat.tiny import build_adapter, build_checkpoint
    from tests import shapes

    shapes.write_config(folder / "gemma-4-E4B-it", shapes.E4B_TEXT, shapes.VISION, shapes.AUDIO)
    tiny = build_checkpoint(folder / "google" / "gemma-4-E4B-it")
    build_adapter(folder / "my-lora", tiny)


def output(commands: str, folder: Path) -> str:
    """What the commands of a console block print in this folder."""
    printed = io.StringIO()
    for line in commands.splitlines():
        program, *arguments = shlex.split(line.removeprefix("$ "))
        if program != "gemma4-compat":
            sys.exit(f"only gemma4-compat is run: {line}")
        try:
            with contextlib.redirect_stdout(printed):
                code = cli.main(arguments)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        if code not in (0, 1):  # 1: for example a device map that does not work as written
            sys.exit(f"exit code {code}: {line}")
    text = printed.getvalue().replace(str(folder), "...")
    for pattern, shown in VARIES.items():
        text = re.sub(pattern, shown, text)
    return re.sub(r"(?m) +$", "", text).strip("\n") + "\n"


def page(text: str, folder: Path, check: bool = False) -> str:
    """The page with the output of its commands."""
    parts, end, commands, closed = [], 0, "", 0
    for block in BLOCK.finditer(text):
        if block["language"] == "console":
            commands, closed = block["text"], block.end()
        elif block["language"] == "text" and block["mark"] != "not run":
            follows = not text[closed : block.start()].strip()
            if block["indent"] or not commands or not (follows or block["mark"]):
                line = text[: block.start()].count("\n") + 1
                sys.exit(f"line {line}: nothing says which commands print this, or it is indented")
            shown = output(commands, folder)
            if not check or prose(shown, block["mark"]) != prose(block["text"], block["mark"]):
                parts += [text[end : block.start("text")], shown]
                end = block.end("text")
    return "".join([*parts, text[end:]])


def prose(text: str, mark: str | None) -> str:
    """What is the same on every machine; on a CPU with fewer patches only their sum is."""
    if mark:
        return "\n".join(line for line in text.splitlines() if not re.search(r"\d", line))
    counts = r"(\d+) applied(?: \([^)]*\))?, (\d+)\s+not\s+needed\s+here"
    return re.sub(counts, lambda found: str(int(found[1]) + int(found[2])), text)


def main(argv: list[str]) -> int:
    os.environ |= {"COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    check, stale = "--check" in argv, False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        fill(folder)
        pages = [Path(each).resolve() for each in argv if each != "--check"]
        os.chdir(folder)
        for file in pages:
            print(file.name, file=sys.stderr)
            old = file.read_text(encoding="utf-8")
            new = page(old, folder, check)
            if check and new != old:
                stale = True
                lines = difflib.unified_diff(
                    old.splitlines(True), new.splitlines(True), file.name, "what the commands print"
                )
                sys.stdout.writelines(lines)
            elif new != old:
                file.write_text(new, encoding="utf-8", newline="\n")
        os.chdir(Path(__file__).parent)  # Windows does not remove the current folder
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
