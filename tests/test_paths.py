"""Paths with backslashes and spaces, also under the rules of Windows."""

from __future__ import annotations

import ast
import shlex
from pathlib import PureWindowsPath

import pytest

from gemma4_compat.files import hub
from gemma4_compat.planning.code import Load
from gemma4_compat.results import text
from tests.support import run_command

WINDOWS = [
    r"C:\Users\Jane Doe\new models\tiny",
    r"\\server\share\new models\tiny",
    r"D:/models\tiny",
    r"..\tiny",
]
ODD = r"my \new 'model' (1)"


@pytest.mark.parametrize("path", [*WINDOWS, "/data/new models/tiny", ODD])
def test_code_that_plan_prints(path):
    """The paths in the code are those that the user wrote."""
    load = Load(
        model=path,
        architecture="Gemma4ForConditionalGeneration",
        quant="nf4",
        compute="bfloat16",
        device_map={"": 0},
        adapter_dir=path,
        train=False,
        rank=16,
    )
    tree = ast.parse("\n".join(load.lines()))
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert strings.count(path) == 2


def test_names_in_titles(monkeypatch):
    assert hub.short_name("google/gemma@refs/pr/1") == "gemma@refs/pr/1"
    assert hub.short_name("google/gemma") == "gemma"
    assert hub.short_name("/data/my models/tiny/") == "tiny"
    assert hub.short_name(".") == "."
    monkeypatch.setattr(hub, "Path", PureWindowsPath)
    assert [hub.short_name(path) for path in WINDOWS] == ["tiny"] * 4


def test_windows_paths_are_no_hub_ids():
    assert [hub.repository(path) for path in WINDOWS] == [None] * 4


@pytest.mark.parametrize("name", ["posix", "nt"])
def test_commands_to_copy(name, monkeypatch):
    words = ["gemma4-compat", "adapter", r"C:\my models\tiny"]
    monkeypatch.setattr(text.os, "name", name)
    line = text.command_line(*words)
    monkeypatch.undo()
    if name == "nt":
        assert line == r'gemma4-compat adapter "C:\my models\tiny"'
    else:
        assert shlex.split(line) == words


def test_commands(model_dir, adapter_dir, tmp_path, monkeypatch, capsys):
    """Backslash, quotes and spaces in the names of the folders and of the map's file."""
    (tmp_path / ODD).symlink_to(model_dir)
    (tmp_path / f"{ODD} lora").symlink_to(adapter_dir)
    (tmp_path / f"{ODD}.json").write_text('{"": 0}')
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("map", ODD, "--map", f"{ODD}.json"),
        ("scan", ODD, "--targets", "q_proj"),
        ("adapter", f"{ODD} lora", "--model", ODD),
        ("plan", ODD, "--gpu", "8GiB", "--adapter", f"{ODD} lora"),
    ):
        assert run_command(*arguments) == 0, capsys.readouterr()
        assert ODD in capsys.readouterr().out
