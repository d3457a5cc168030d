"""A patch that copies code of a library is for the measured code only."""

from __future__ import annotations

import inspect
import logging
import os
import py_compile
import subprocess
import sys
import textwrap
import token
import tokenize
from pathlib import Path

import pytest

from gemma4_compat.engine import fingerprint
from gemma4_compat.engine.patch import Copied
from tests.engine.conftest import logged

BODY = '''
def decorate(function):
    return function

@decorate
def total(x, y=1):
    """What it computes.

    In two paragraphs."""
    name = f"{x!r:>{10}} {{}} {y}" f"plain"
    if x:  # a comment
        return x + y, name
    return y - 1
'''


def of(source):
    """The fingerprint of the last function in a source."""
    lines = textwrap.dedent(source).splitlines(keepends=True)
    first = max(n for n, line in enumerate(lines) if line.startswith(("@", "def total")))
    first -= lines[first - 1].startswith("@")
    return fingerprint.digest(lines[first:])


SAME = {
    "another comment": ("# a comment", "# another ( one"),
    "no comment": ("  # a comment", ""),
    "a line for a comment": ("    if x:", "    # now\n\n    if x:"),
    "another docstring": ("In two paragraphs", "In other words"),
    "other spaces": ("x + y, name", "x+y ,  name"),
    "wider blocks": ("        return x + y", "            return x + y"),
    "a docstring more": ("    return y", '    r"""Raw."""\n    return y'),
}
OTHER = {
    "another operator": ("x + y", "x - y"),
    "another constant": ("y - 1", "y - 2"),
    "another order": ("x + y", "y + x"),
    "another default": ("y=1", "y=2"),
    "another block": ("    return y", "        return y"),
    "another text": ('f"plain"', 'f"plane"'),
    "another format": ("{x!r:>{10}}", "{x!r:>{11}}"),
    "another value in a text": ("{y}", "{x}"),
    "no decorator": ("@decorate\n", ""),
    "a text with a value as docstring": ('    """What', '    f"""What'),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_the_same_code(change):
    assert change[0] in BODY
    assert of(BODY.replace(*change)) == of(BODY)


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_other_code(change):
    assert change[0] in BODY
    assert of(BODY.replace(*change)) != of(BODY)


STRINGS = (
    'f"{x}"', "rf'{x:{y}} {{a}}'", 'f"""é {x}\n  {f"{y}"} ü"""', 'f"" "plain" f\'{x["a"]}\'',
    'f"{x=}" + f"ü{x}ü" + str(x)',
)  # fmt: skip


def other_tokens(monkeypatch):
    """Let strings with values have the tokens of Python 3.12 before it, and of 3.11 after it."""
    usual = tokenize.generate_tokens
    start, middle, end = 1001, 1002, 1003
    if sys.version_info >= (3, 12):
        start, middle, end = token.FSTRING_START, token.FSTRING_MIDDLE, token.FSTRING_END

    def split(readline):
        for each in usual(readline):
            kind, text, begin, stop, line = each
            if kind == token.STRING and "f" in text[:2].lower():
                yield start, text[:2], begin, (begin[0], begin[1] + 2), line
                yield middle, "...", begin, stop, line
                yield token.NAME, "x", begin, stop, line
                yield end, text[-1:], (stop[0], stop[1] - 1), stop, line
            else:
                yield each

    def joined(readline):
        lines, depth, first = [], 0, None

        def kept():
            lines.append(readline())
            return lines[-1]

        for kind, text, begin, stop, line in usual(kept):
            if kind == start:
                first, depth = first or begin, depth + 1
            elif kind == end:
                depth -= 1
                if not depth:
                    rows = lines[first[0] - 1 : stop[0]]
                    rows[-1] = rows[-1][: stop[1]]
                    whole = "".join(rows)[first[1] :]
                    yield token.STRING, whole, first, stop, line
                    first = None
            elif not depth:
                yield kind, text, begin, stop, line

    monkeypatch.setattr(fingerprint, "_STARTS", [start, None])
    monkeypatch.setattr(fingerprint, "_ENDS", [end, None])
    new = joined if sys.version_info >= (3, 12) else split
    monkeypatch.setattr(fingerprint, "generate_tokens", new)


@pytest.mark.parametrize("text", STRINGS)
def test_strings_of_another_python(text, monkeypatch):
    lines = f"def total(x, y):\n    z = ({text}, 1)\n    return z\n".splitlines(keepends=True)
    expected = fingerprint.digest(lines)
    other_tokens(monkeypatch)
    assert fingerprint.digest(lines) == expected
    assert fingerprint.digest([lines[0], *lines[1:-1], "    return y\n"]) != expected


def pythons():
    """Other Pythons of this machine, from 3.10."""
    found = Path.home().glob(".pyenv/versions/3.1[0-9].*/bin/python")
    return [each for each in found if each.resolve() != Path(sys.executable).resolve()]


def test_other_pythons(tmp_path):
    """Functions of this Python's library have one fingerprint in all of them."""
    import dataclasses
    import json
    import typing

    source = inspect.getsource(fingerprint)
    source = source.replace("from .patch import Copied", "Copied = object")
    source = source.replace("from .slots import resolve", "")
    (tmp_path / "alone.py").write_text(source)
    texts = [inspect.getsource(module) for module in (dataclasses, json.decoder, typing)]
    (tmp_path / "sample.py").write_text("\n".join([*texts, *(f"{s} + ü\n" for s in STRINGS)]))
    run = "import alone; print(alone.digest(list(open('sample.py', encoding='utf-8'))))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONUTF8": "1"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "check": True}
    each = [sys.executable, *map(str, pythons())]
    found = {subprocess.run([python, "-c", run], **options).stdout for python in each}
    assert len(found) == 1


LIBRARY = """
def total(x):
    return x + 1

def other(x):
    return total(x) * 2
"""


@pytest.fixture
def copying(lib):
    """A patch that copies ``total`` of a library, and knows its code."""
    lib.write("sums", LIBRARY)
    known = fingerprint.digest(LIBRARY.splitlines(keepends=True)[1:3])

    def build(**options):
        patch = lib.patch("sums", "sums:other")
        patch.copies(f"{lib.name}.sums", "total", f"{'0' * 12} {known}", **options)
        return patch

    return build


def test_measured_code(lib, copying, make):
    engine = make(copying())
    module = lib.load("sums")
    assert engine.status()["sums"].state == "applied"
    assert module.other(1) == "sums>4"


def test_changed_code(lib, copying, make, caplog):
    lib.write("sums", LIBRARY.replace("x + 1", "1 + x"))
    engine = make(copying())
    module = lib.load("sums")
    status = engine.status()["sums"]
    assert status.state == "drifted"
    name = f"{lib.name}.sums.total"
    assert status.reason == (
        f"{name} has other code than in the measured releases, or no source that can be read"
    )
    assert module.other(1) == 4
    assert len(logged(caplog, logging.WARNING)) == 1


def test_no_source(lib, copying, make):
    """Installations without source: the patch is not applied."""
    file = lib.root / "sums.py"
    py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")), doraise=True)
    patch = copying()
    file.unlink()
    engine = make(patch)
    assert lib.load("sums").other(1) == 4
    status = engine.status()["sums"]
    assert (status.state, "no source that can be read" in status.reason) == ("drifted", True)


def test_a_function_that_is_gone(lib, copying, make):
    lib.write("sums", LIBRARY.replace("total", "summed"))
    engine = make(copying())
    lib.load("sums")
    assert engine.status()["sums"].state == "drifted"


def test_code_that_these_versions_do_not_have(lib, copying, make):
    lib.write("sums", LIBRARY.replace("total", "summed"))
    engine = make(copying(when="packaging<1"))
    lib.load("sums")
    assert engine.status()["sums"].state == "applied"


def test_no_python_function():
    for attribute in ("sep", "path.join.__name__", "getcwd"):
        assert not fingerprint.is_measured(Copied("os", attribute, "0" * 12))
