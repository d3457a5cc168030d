"""The demo on the real libraries, and what it makes of stories that go wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from gemma4_compat import InputError
from gemma4_compat.demo import play
from gemma4_compat.demo.play import Demo, Outcome
from gemma4_compat.demo.stories import STORIES, Story
from gemma4_compat.demo.worker import one_line

PRETEND_STORIES = """
import os, time

WITH = os.environ.get("GEMMA4_COMPAT") != "0"

def fine(stage):
    print("hello from", stage.scratch)

def builds(stage):
    pass

def cannot_build(stage):
    raise ImportError("no Gemma4")

def raises_with(stage):
    if WITH:
        raise ValueError("first line\\nlast line")

def crashes(stage):
    os.write(2, b"last words\\n")
    os._exit(3)

crashes_too = crashes

def hangs(stage):
    time.sleep(1000)

def adapter_forgotten(stage):
    expected = stage.with_adapter(stage.load(towers_in_float=True), "named")
    stage.compare(stage.load(towers_in_float=True), expected)
"""


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Makes stories of functions in PRETEND_STORIES, which the demo's processes can import."""
    (tmp_path / "pretend_stories.py").write_text(PRETEND_STORIES)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *names: [
        Story(name.replace("_", " "), f"pretend_stories:{name}") for name in names
    ]


def test_the_first_story(tmp_path, monkeypatch):
    """A sample of the slow test below."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    found = play.demo(STORIES[:1], keep=tmp_path)
    assert found.ok
    rows = found.as_dict()["stories"]
    assert [row["story"] for row in rows] == [STORIES[0].title]
    assert [row["with"]["text"] for row in rows] == ["equal"]
    assert (tmp_path / "with" / STORIES[0].name / "log.txt").exists()


@pytest.mark.slow
def test_every_story_ends_well_with_the_patches(tmp_path, monkeypatch):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["GEMMA4_COMPAT_CLIPPABLE_LINEAR"] = "0"  # the demo shows the patches regardless
    command = [sys.executable, "-m", "gemma4_compat", "demo", "--json", "--keep", str(tmp_path)]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    printed = json.loads(ran.stdout)
    assert printed["ok"]
    rows = printed["stories"]
    assert [row["story"] for row in rows] == [story.title for story in STORIES]
    assert {row["story"]: row["with"]["text"] for row in rows} == {
        story.title: "equal" for story in STORIES
    }
    assert ran.returncode == 0
    total = 2 * len(STORIES)
    assert f"[{total}/{total}] " in ran.stderr
    assert (tmp_path / "model" / "config.json").exists()
    assert (tmp_path / "with" / STORIES[0].name / "log.txt").exists()

    outcomes = [{side: Outcome(**row[side]) for side in ("without", "with")} for row in rows]
    lines = shown(STORIES, outcomes, monkeypatch)
    assert all(len(line) <= 80 for line in lines)
    assert [line for line in lines if line.startswith("  with ")] == ["  with     equal"] * len(
        rows
    )


def shown(stories, outcomes, monkeypatch):
    """The printed lines, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return str(Demo(tuple(stories), tuple(outcomes), 60.0)).splitlines()


@pytest.mark.slow
def test_a_wrong_model_is_noticed_and_fails_the_demo(pretend):
    found = play.demo(pretend("adapter_forgotten"))
    assert not found.ok
    [row] = found.as_dict()["stories"]
    for side in ("without", "with"):
        assert row[side]["outcome"] == "wrong"
        assert row[side]["text"].startswith("wrong by ")


def outcomes_of(stories, folder):
    sides = ("without", "with")
    results = play.play(stories, {side: play._run(side, stories, folder) for side in sides})
    return {side: [result[side] for result in results] for side in sides}


def test_whatever_becomes_of_a_story_is_a_result(pretend, tmp_path):
    equal = Outcome("equal", "equal")
    crashed = Outcome("crash", "exit code 3: last words")
    outcomes = outcomes_of(pretend("crashes", "fine", "raises_with", "crashes_too"), tmp_path)
    assert outcomes == {
        "without": [crashed, equal, equal, crashed],
        "with": [crashed, equal, Outcome("error", "ValueError: first line last line"), crashed],
    }
    assert (tmp_path / "with" / "fine" / "log.txt").read_text().startswith("hello from ")


def test_a_story_that_hangs_is_stopped(pretend, tmp_path, monkeypatch):
    monkeypatch.setattr(play, "_SECONDS", 2)
    hung, fine = Outcome("crash", "not finished after 2 s"), Outcome("equal", "equal")
    found = outcomes_of(pretend("hangs", "fine"), tmp_path)
    assert found == {"without": [hung, fine], "with": [hung, fine]}


def test_a_story_that_raises_with_the_patches_fails_the_demo(pretend, monkeypatch, capsys):
    monkeypatch.setattr(play, "_BUILD", *pretend("builds"))
    mixed, fine = play.demo(pretend("fine", "raises_with")), play.demo(pretend("fine"))
    assert (mixed.ok, mixed.verdict) == (
        False,
        "1 of 2 stories succeed with gemma4_compat, 2 without",
    )
    assert (fine.ok, fine.verdict) == (True, "1 of 1 stories succeed with gemma4_compat, 1 without")
    assert fine.verdict in str(fine)
    printed = capsys.readouterr()
    assert "with     raises with: ValueError: first line last line" in printed.err
    assert "[4/4] " in printed.err


def test_model_that_cannot_be_built(pretend, monkeypatch):
    monkeypatch.setattr(play, "_BUILD", *pretend("cannot_build"))
    with pytest.raises(InputError, match="cannot build the model: ImportError: no Gemma4"):
        play.demo(pretend("fine"))


def test_what_is_in_a_folder_is_left_alone(pretend, tmp_path):
    with pytest.raises(InputError, match="is not an empty folder"):
        play.demo(pretend("fine"), keep=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pretend_stories.py"]


def test_long_messages_are_shortened_and_wrapped(monkeypatch):
    message = one_line(
        "Target module Gemma4ClippableLinear(\n  (linear): Linear(in_features=1)\n) is not "
        "supported. Currently, only the following modules are supported: `torch.nn.Linear`, ..."
    )
    assert message.startswith("Target module Gemma4ClippableLinear(...) is not supported.")
    result = {"without": Outcome("error", message), "with": Outcome("equal", "equal")}
    stories = [Story("load an adapter with broad targets and many words", "")]
    lines = shown(stories, [result], monkeypatch)
    assert max(map(len, lines)) <= 80
    assert 6 <= len(lines) <= 9


def test_the_demo_says_first_how_long_it_will_take(pretend, monkeypatch, capsys):
    monkeypatch.setattr(play, "_BUILD", *pretend("builds"))
    play.demo(pretend("fine"))
    lines = capsys.readouterr().err.splitlines()
    [number] = [n for n, line in enumerate(lines) if line.startswith("[1/2] ")]
    assert re.fullmatch(r"1 stories, .* take about \d+ s", lines[number - 1])
