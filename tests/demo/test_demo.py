"""The demo on the real libraries, and what it makes of stories that go wrong."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from gemma4_compat.demo import play
from gemma4_compat.demo.play import Result
from gemma4_compat.demo.stories import STORIES, Story
from gemma4_compat.demo.worker import one_line

PRETEND_STORIES = """
import os, time
from gemma4_compat.demo.stage import Failure, compare

WITH = os.environ.get("GEMMA4_COMPAT") != "0"

def fine(stage):
    print("hello from", stage.scratch)

def raises_with(stage):
    if WITH:
        raise ValueError("first line\\nlast line")

def crashes(stage):
    os.write(2, b"last words\\n")
    os._exit(3)

def hangs(stage):
    time.sleep(1000)

def adapter_forgotten(stage):
    expected = stage.with_adapter(stage.load(towers_in_float=True), "named")
    compare(stage.load(towers_in_float=True), expected)
"""


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Makes stories of functions in PRETEND_STORIES, which the demo's processes can import."""
    (tmp_path / "pretend_stories.py").write_text(PRETEND_STORIES)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *names: [Story(name.replace("_", " "), "pretend_stories", name) for name in names]


def test_every_story_ends_well_with_the_patches(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["GEMMA4_COMPAT_CLIPPABLE_LINEAR"] = "0"  # the demo shows the patches regardless
    command = [sys.executable, "-m", "gemma4_compat", "demo", "--json", "--keep", str(tmp_path)]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    rows = json.loads(ran.stdout)
    assert [row["story"] for row in rows] == [story.title for story in STORIES]
    assert {row["story"]: row["with"]["text"] for row in rows} == {
        story.title: "equal" for story in STORIES
    }
    assert ran.returncode == 0
    total = 1 + 2 * len(STORIES)
    assert f"[{total}/{total}] " in ran.stderr
    assert (tmp_path / "model" / "config.json").exists()
    assert (tmp_path / "with" / STORIES[0].function / "log.txt").exists()

    results = [{side: Result(**row[side]) for side in ("without", "with")} for row in rows]
    table = play.table(STORIES, results, columns=80)
    assert all(len(line) <= 80 for line in table.splitlines())
    assert table.splitlines()[0].split() == ["story", "|", "without", "|", "with"]


def test_a_wrong_model_is_noticed_and_fails_the_demo(pretend, capsys):
    assert play.demo(pretend("adapter_forgotten"), as_json=True) == 1
    [row] = json.loads(capsys.readouterr().out)
    for side in ("without", "with"):
        assert row[side]["outcome"] == "wrong"
        assert row[side]["text"].startswith("wrong by ")


@pytest.mark.parametrize("device", ["cpu", "cuda"], ids=["forked", "fresh"])
def test_whatever_becomes_of_a_story_is_a_result(pretend, tmp_path, monkeypatch, device):
    monkeypatch.setattr(play, "_SECONDS", 4)
    stories = pretend("fine", "raises_with", "crashes", "hangs")
    progress = play._Progress(8, io.StringIO())
    results = play.play(stories, tmp_path, progress, device=device)
    crashed = Result("crash", "exit code 3: last words")
    hung = Result("crash", "no end within 4 s")
    assert [result["without"] for result in results] == [
        Result("equal", "equal"),
        Result("equal", "equal"),
        crashed,
        hung,
    ]
    assert [result["with"] for result in results] == [
        Result("equal", "equal"),
        Result("error", "ValueError: first line last line"),
        crashed,
        hung,
    ]


def test_a_story_that_raises_with_the_patches_fails_the_demo(pretend, monkeypatch, capsys):
    monkeypatch.setattr(play, "_process", _without_building(play._process))
    assert play.demo(pretend("fine", "raises_with")) == 1
    assert play.demo(pretend("fine")) == 0
    printed = capsys.readouterr()
    assert "with     raises with: ValueError: first line last line" in printed.err
    assert "1 of 2 stories end well" in printed.out
    assert "1 of 1 stories end well" in printed.out
    assert "[5/5] " in printed.err


def _without_building(process):
    def wrapped(start, folder, scratch, *story):
        return process(start, folder, scratch, *story) if story else Result("built", "cuda")

    return wrapped


def test_model_that_cannot_be_built(pretend, monkeypatch, capsys):
    monkeypatch.setattr(play, "_process", lambda *_: Result("error", "ImportError: no Gemma4"))
    assert play.demo(pretend("fine")) == 2
    assert "cannot build the model: ImportError: no Gemma4" in capsys.readouterr().err


def test_what_is_in_a_folder_is_left_alone(pretend, tmp_path, capsys):
    assert play.demo(pretend("fine"), keep=tmp_path) == 2
    assert "is not an empty directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["pretend_stories.py"]


def test_terminal_progress_rewrites_one_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    progress = play._Progress(2, terminal)
    with progress.work("first"), progress.work("a long title " * 20) as done:
        done("equal")
    progress.close()
    written = terminal.getvalue()
    assert "\n" not in written
    assert all(len(piece) < 200 for piece in written.split("\r\x1b[K"))
    assert written.endswith("\r\x1b[K")


def test_long_messages_are_shortened_and_wrapped():
    message = one_line(
        "Target module Gemma4ClippableLinear(\n  (linear): Linear(in_features=1)\n) is not "
        "supported. Currently, only the following modules are supported: `torch.nn.Linear`, ..."
    )
    assert message.startswith("Target module Gemma4ClippableLinear(...) is not supported.")
    result = {"without": Result("error", message), "with": Result("equal", "equal")}
    stories = [Story("load an adapter with broad targets and many words", "", "")]
    lines = play.table(stories, [result], columns=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert 4 <= len(lines) <= 7
