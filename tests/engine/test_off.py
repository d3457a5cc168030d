"""What a status says where patches are switched off, on purpose or by mistake."""

from __future__ import annotations

import json.tool  # noqa: F401 - the patched module
import logging
import re

import pytest

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat.cli.status import One
from gemma4_compat.engine import Patch
from gemma4_compat.engine.core import Engine
from gemma4_compat.engine.status import About, State
from gemma4_compat.engine.switches import read
from gemma4_compat.results.status import Status

GREEN, YELLOW, RED = "#278a47", "#a06a00", "#dc3f38"
NAMES = ("clippable_linear", "shared_states")


def patch_called(name):
    patch = Patch(name, symptom="", affects=("packaging>=1",))
    patch.replaces("json.tool", "main")(lambda original: lambda: original())
    return patch


def engine_for(environ, **about):
    patches = [patch_called(name) for name in NAMES]
    logger = logging.getLogger("off")
    switches = read("OFF_TEST", dict.fromkeys(NAMES, ()), logger, environ)
    return Engine(patches, switches, logger, about=About(**about, status=Status))


@pytest.mark.parametrize(
    ("environ", "verdict", "code", "color"),
    [
        ({}, "all well: 2 applied (2 fix errors)", 0, GREEN),
        ({"OFF_TEST": "0"}, "OFF: all 2 patches are switched off by OFF_TEST=0", 0, YELLOW),
        (
            {"OFF_TEST": "only:clippable_linear"},
            "all well: 1 disabled, 1 applied (1 fix errors)", 0, GREEN,
        ),
        (
            {"OFF_TEST": "only:cliplable_linear"},
            "NOT well: OFF_TEST=only:cliplable_linear: no patch is called cliplable_linear "
            "(did you mean clippable_linear?), so all patches are off", 1, RED,
        ),
        (
            {"OFF_TEST": "only:clippable_linear,shared_stats"},
            "NOT well: OFF_TEST=only:clippable_linear,shared_stats: no patch is called "
            "shared_stats (did you mean shared_states?)", 1, RED,
        ),
        (
            {"OFF_TEST": "only:"},
            "NOT well: OFF_TEST=only:: no patch is named after only:, so all patches are off",
            1, RED,
        ),
    ],
    ids=["on", "0", "only", "typo", "half a typo", "only nothing"],
)  # fmt: skip
def test_verdict(environ, verdict, code, color, monkeypatch, capsys):
    engine = engine_for(environ)
    monkeypatch.setattr(gemma4_compat, "_started", engine)
    try:
        status = engine.install()
        assert set(status.verdict.replace(",", "").split()) == set(verdict.replace(",", "").split())
        assert (status.ok, status.exit_code) == (color is GREEN, code)
        assert re.search("color: (#[0-9a-f]+)", status._repr_html_())[1] == color
        assert cli.main(["status"]) == code
        assert status.verdict in " ".join(capsys.readouterr().out.split())
    finally:
        engine.retire()


def test_uninstalled_patches(monkeypatch):
    engine = engine_for({})
    try:
        engine.install()
        status = engine.uninstall()
        assert status.verdict == "OFF: all 2 patches are switched off by uninstall()"
        assert (status.ok, status.exit_code) == (False, 0)
        assert status.advice == ("to have the patches again, call off_test.install()",)
        assert engine.install().ok
    finally:
        engine.retire()


def test_all_that_are_needed_are_off(monkeypatch, capsys):
    """That another patch is not needed here makes it no better."""
    needed, other = patches = [patch_called(name) for name in NAMES]
    other.affects = ("packaging<1",)
    logger = logging.getLogger("off")
    switches = read(
        "OFF_TEST", dict.fromkeys(NAMES, ()), logger, {f"OFF_TEST_{needed.name}".upper(): "0"}
    )
    engine = Engine(patches, switches, logger)
    monkeypatch.setattr(gemma4_compat, "_started", engine)
    try:
        status = engine.install()
        assert status.verdict == (
            "OFF: 1 of 2 patches are switched off by OFF_TEST_CLIPPABLE_LINEAR=0, and no "
            "other is applied"
        )
        assert (status.ok, status.exit_code) == (False, 0)
        assert status.advice == (
            "to have the patches again, unset OFF_TEST_CLIPPABLE_LINEAR and restart",
        )
        assert "\nclippable_linear " not in str(status)  # no list of what the verdict says
        assert cli.main(["status", "clippable_linear"]) == 0
        assert capsys.readouterr().out.startswith("clippable_linear: disabled")
        assert One(status["clippable_linear"])._repr_html_().count(YELLOW) == 1
    finally:
        engine.retire()


def test_a_failed_patch_is_not_hidden(monkeypatch):
    """Where the others are off."""
    _, second = patches = [patch_called(name) for name in NAMES]
    second.probe(lambda: 1 / 0)
    logger = logging.getLogger("off")
    environ = {"OFF_TEST_CLIPPABLE_LINEAR": "0"}
    engine = Engine(patches, read("OFF_TEST", dict.fromkeys(NAMES, ()), logger, environ), logger)
    try:
        status = engine.install()
        assert status["shared_states"].state is State.FAILED
        assert status.verdict.startswith("NOT well: 1 ")
        assert status.exit_code == 1
    finally:
        engine.retire()


def test_without_a_library():
    """Then a missing library is the verdict, also where all patches are off."""
    engine = engine_for({"OFF_TEST": "0"}, required=("no_such_library",))
    try:
        status = engine.install()
        assert status.verdict == "NOT well: no_such_library is not installed"
        assert (status.ok, status.exit_code) == (False, 1)
    finally:
        engine.retire()


def test_a_switch_that_is_set_too_late(monkeypatch):
    monkeypatch.setenv("OFF_TEST_SHARED_STATES", "1")
    engine = engine_for(None)
    try:
        assert not engine.install().notes
        monkeypatch.setenv("OFF_TEST_CLIPPABLE_LINEAR", "0")
        monkeypatch.setenv("OFF_TEST_OTHER", "0")  # another program's
        monkeypatch.delenv("OFF_TEST_SHARED_STATES")
        monkeypatch.setenv("OFF_TEST_STRICT", "0")
        first, strict = engine.status().notes
        assert first.startswith("OFF_TEST_CLIPPABLE_LINEAR was changed after the import")
        assert first.endswith('call off_test.uninstall("clippable_linear") now')
        assert strict.startswith("OFF_TEST_STRICT was changed")
        assert strict.endswith("restart the process")  # there is no such patch
        monkeypatch.delenv("OFF_TEST_STRICT")
        engine.uninstall("clippable_linear")  # as the note said
        assert not engine.status().notes
        engine.install()
        monkeypatch.setenv("OFF_TEST", "only:shared_states")
        [note, _] = engine.status().notes
        assert note.startswith("OFF_TEST was changed")
        assert note.endswith("restart the process")
    finally:
        engine.retire()


def test_a_switch_that_is_removed_too_late(monkeypatch):
    """Then the patch stays off, and `install` does not change that."""
    monkeypatch.setenv("OFF_TEST_SHARED_STATES", "0")
    engine = engine_for(None)
    try:
        engine.install()
        monkeypatch.delenv("OFF_TEST_SHARED_STATES")
        [note] = engine.install("shared_states").notes
        assert note.startswith("OFF_TEST_SHARED_STATES was changed")
        assert note.endswith("restart the process")
    finally:
        engine.retire()


def test_a_terminal_hears_what_a_command_waits_for(monkeypatch, capsys):
    """A pipe does not."""
    import sys
    import time

    for is_terminal in (True, False):
        engine = engine_for({})
        monkeypatch.setattr(gemma4_compat, "_started", engine)
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer, raising=False)
        slow = engine.import_targets
        monkeypatch.setattr(engine, "import_targets", lambda s=slow: time.sleep(0.9) or s())
        cli.main(["status"])
        printed = capsys.readouterr()
        line = "gemma4-compat status: first imports torch, transformers, accelerate, peft and bits"
        assert printed.err.startswith(line) is is_terminal
        assert "first imports" not in printed.out
        engine.retire()
