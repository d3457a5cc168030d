"""What the kind ``fast`` means is said once, in ``FAST_MEANS``; every other text says the same."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

import gemma4_compat
from gemma4_compat.cli import run
from gemma4_compat.engine.patch import FAST_MEANS, Kind
from gemma4_compat.patches import load, topics
from tests.exact import NAMED

ROOT = Path(__file__).parents[1]
#: The same with one subject: "it rounds differently or runs a step ahead".
OF_ONE = re.sub(r"\b(round|run)\b", r"\1s", FAST_MEANS)
FOLDERS = ("gemma4_compat", "docs", "benchmarks", "examples", "tools", "tests")
PAGES = [*ROOT.glob("*.md"), *(f for each in FOLDERS for f in (ROOT / each).rglob("*"))]
#: What rounds differently of itself: kernels, chunks of a prompt, exceptions of other kinds.
OTHERS = {
    "README.md": 2,
    "gemma4_compat/patches/attention/one_token_attention.py": 1,
    "gemma4_compat/patches/attention/sliding_prompt_attention.py": 1,
    "gemma4_compat/runtime/capture/cudnn.py": 1,
    "tests/patches/test_captured_drafting.py": 1,
    "tests/patches/test_chunked_prefill_images.py": 1,
    "tests/patches/test_cpu_packed_dequantize.py": 1,
    "tests/support.py": 1,
    "tests/test_doors.py": 1,
}
ROUNDS = r"rounds? (?:differently|otherwise)|differs? by rounding"
#: generated from the patches, and the history
LEFT_OUT = ("CHANGELOG.md", "docs/patches/", "patches.md", "tests/test_kinds.py")
#: A text that says what the kind is, and where.
SAID = {
    "README.md": ("`fast`: faster, but {one}", "| `fast`"),
    "docs/how-it-works.md": ("| `fast` | save time, and {means} |", "the patches that {means} are"),
    "docs/commands.md": ("faster, but [{means}](how-it-works.md#kinds)", "faster, but {one}"),
    "examples/t4.ipynb": ("faster, but {one}",),
    "gemma4_compat/__init__.py": ("kind ``fast``, which {means}",),
    "gemma4_compat/planning/code.py": ("faster, but {one}",),
    "gemma4_compat/engine/status.py": ("it is faster, but {one}, and nobody asked for it",),
    "CONTRIBUTING.md": ("The kind is `fast` if the patch {one},",),
}


def text_of(file):
    """In one line, without the marks of comments and of a docstring's lines."""
    if file.suffix not in (".md", ".py", ".ipynb", ".svg", ".toml") or not file.is_file():
        return ""
    return re.sub(r"\s+(#:? )?", " ", file.read_text(encoding="utf-8"))


def test_no_other_text_defines_it():
    found = {}
    for file in PAGES:
        name = file.relative_to(ROOT).as_posix()
        if not name.startswith(LEFT_OUT):
            text = text_of(file).replace(FAST_MEANS, "").replace(OF_ONE, "")
            found[name] = len(re.findall(ROUNDS, text))
    assert {name: count for name, count in found.items() if count} == OTHERS


@pytest.mark.parametrize("page", SAID)
def test_texts_that_define_it(page):
    text = text_of(ROOT / page)
    for said in SAID[page]:
        assert said.format(means=FAST_MEANS, one=OF_ONE) in text


def test_what_is_printed(capsys):
    assert Kind.FAST.does == f"save time and {FAST_MEANS}"
    parser = argparse.ArgumentParser()
    run.COMMAND.add_to(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["run", "--help"])
    assert FAST_MEANS in " ".join(capsys.readouterr().out.split())
    gemma4_compat.uninstall("fast")
    optional = [each for each in gemma4_compat.status() if each.state == "optional"]
    assert optional
    assert all(each.reason.startswith(FAST_MEANS) for each in optional)
    assert f"faster, but {FAST_MEANS}: " in " ".join(str(gemma4_compat.status()).split())


#: The patches of this kind that change no bit, and what they do instead.
AHEAD = {"deferred_stop_check": "reads the answer while the next step runs"}


def test_each_patch_of_the_kind_rounds_differently_or_runs_ahead():
    fast = {patch.name: patch for patch in load() if patch.kind is Kind.FAST}
    modules = [module for each in topics().values() for module in each]
    causes = {module.PATCH.name: module.__doc__ for module in modules}
    assert AHEAD.keys() < fast.keys()
    assert fast.keys().isdisjoint(NAMED), "those change bits after an import alone"
    for name, patch in fast.items():
        says = f"{' '.join(causes[name].split())} {patch.note}"
        assert (AHEAD[name] in says) if name in AHEAD else re.search("round|exact", says), name
