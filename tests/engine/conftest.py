"""Throw-away libraries on sys.path, and engines that patch them."""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
import textwrap
from functools import wraps

import pytest

from gemma4_compat.engine import Patch
from gemma4_compat.engine.core import Engine
from gemma4_compat.engine.switches import Switches

_numbers = itertools.count()
ALWAYS = ("packaging>=1",)
NEVER = ("packaging<1",)


class Library:
    """A package with a name of its own, so that tests do not meet in sys.modules."""

    def __init__(self, root, name):
        self.root, self.name = root / name, name
        self.root.mkdir()
        self.write("__init__", "")

    def write(self, module, source):
        source = textwrap.dedent(source).replace("LIB", self.name)
        (self.root / f"{module}.py").write_text(source)

    def load(self, module):
        return importlib.import_module(f"{self.name}.{module}")

    def patch(self, name, *targets, affects=ALWAYS, probe=None, tag=None, requires=()):
        """A patch that puts ``name>`` in front of what the targets ("module:attribute") return."""
        patch = Patch(name, symptom="", affects=affects, requires=requires)
        for target in targets:
            module, _, attribute = target.partition(":")
            patch.replaces(f"{self.name}.{module}", attribute)(tagging(tag or name))
        if probe:
            patch.probe(probe)
        return patch


def tagging(tag):
    def factory(original):
        @wraps(original)
        def replacement(*args, **kwargs):
            return f"{tag}>{original(*args, **kwargs)}"

        return replacement

    return factory


@pytest.fixture
def lib(tmp_path, monkeypatch):
    importlib.invalidate_caches()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    library = Library(tmp_path, f"library{next(_numbers)}")
    library.write(
        "m",
        """
        def f(): return "f"
        def g(): return "g"
        class Base:
            def method(self): return "method"
            @staticmethod
            def static(): return "static"
            @classmethod
            def of(cls): return cls.__name__
        class Sub(Base):
            pass
        """,
    )
    library.write("n", "from LIB.m import f as captured\ndef h(): return 'h'")
    yield library
    for name in list(sys.modules):
        if name.partition(".")[0] == library.name:
            del sys.modules[name]


@pytest.fixture
def make(caplog):
    """Build an engine of some patches, installed unless asked otherwise."""
    caplog.set_level(logging.DEBUG, "engine")
    made = []

    def build(*patches, install=True, prefix=None, floors=None, newest=None, **switches):
        prefix = prefix or f"TEST{next(_numbers)}"
        logger = logging.getLogger("engine")
        engine = Engine(patches, Switches(prefix, **switches), logger, floors, newest)
        made.append(engine)
        if install:
            engine.install()
        return engine

    yield build
    for engine in reversed(made):
        engine.retire()


def snapshot(*owners):
    """The very objects in these namespaces, in order."""
    return [[(key, id(value)) for key, value in vars(owner).items()] for owner in owners]


def logged(caplog, level):
    return [r.getMessage() for r in caplog.records if r.name == "engine" and r.levelno == level]
