"""The command line, mostly in fresh processes: it replaces ``__main__`` and ``sys.path``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat.engine import Patch
from gemma4_compat.engine.core import Engine
from gemma4_compat.engine.switches import Switches
from gemma4_compat.patches import load
from gemma4_compat.versions import WITH_TORCH
from tests.support import run_command, run_process

PATCHES = [patch.name for patch in load()]


def python(*arguments, cwd=None, **variables):
    """Run Python with the package on its path and without our environment variables."""
    return run_process([sys.executable, *arguments], filter(None, sys.path), cwd, **variables)


def compat(*arguments, **options):
    return python("-m", "gemma4_compat", *arguments, **options)


# -- status -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def status():
    return compat("status", "-v", COLUMNS="80")


@pytest.mark.xdist_group("status")
def test_status_table(status):
    lines = status.stdout.splitlines()
    assert lines[0] == f"gemma4-compat {gemma4_compat.__version__}"
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("all well: ")
    after = lines[lines.index("") :]  # the verdict
    first_words = [line.split()[0] for line in after if line and not line.startswith(" ")]
    assert first_words[: len(WITH_TORCH)] == list(WITH_TORCH)
    assert first_words[-len(PATCHES) :] == PATCHES
    assert "armed" not in status.stdout
    assert status.returncode == 0


def test_status_shows_what_needs_attention(monkeypatch, capsys):
    """A CPU-only build of PyTorch does, and patches that work do not."""
    import torch

    with gemma4_compat.disabled("clippable_linear"):
        assert cli.main(["status"]) == 0
    printed = capsys.readouterr().out
    shown = {name for name in PATCHES if f"\n{name} " in printed}
    needing = {patch.name for patch in load() if "clippable_linear" in patch.requires}
    assert {"clippable_linear"} <= shown <= {"clippable_linear"} | needing
    assert "1 disabled" in printed
    for cuda, expected in ((None, True), ("13.0", False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        cli.main(["status"])
        printed = capsys.readouterr().out
        assert ("CPU-only build" in printed) is (expected and sys.platform != "darwin")
        assert ("pip install torch --index-url" in " ".join(printed.split())) is expected


@pytest.mark.xdist_group("status")
def test_status_keeps_the_libraries_quiet(status):
    assert status.stderr == ""


def test_status_as_json(capsys):
    with gemma4_compat.disabled("peft_redispatch"):
        assert cli.main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == f"gemma4-compat {gemma4_compat.__version__}"
    assert list(found["libraries"]) == list(WITH_TORCH)
    assert list(found["patches"]) == PATCHES
    assert found["patches"]["peft_redispatch"]["state"] == "disabled"


def test_typo_in_the_environment_is_pointed_out():
    ran = compat("run", "-h", GEMMA4_COMPAT_PEFT_REDISPACH="0")
    assert "GEMMA4_COMPAT_PEFT_REDISPACH" in ran.stderr
    assert "did you mean GEMMA4_COMPAT_PEFT_REDISPATCH?" in ran.stderr
    assert all(len(line) < 160 for line in ran.stderr.splitlines())


@pytest.mark.parametrize("strict", [False, True])
def test_status_exit_code_where_a_patch_is_blocked(monkeypatch, capsys, strict):
    """A switched-off patch does not change the exit code: the user chose it."""
    patches = [
        Patch(name, symptom="", affects=("packaging>=1",), requires=needed)
        for name, needed in (("first", ()), ("second", ("first",)), ("third", ()))
    ]
    for patch in patches:
        patch.replaces("json.tool", "main")(lambda original: lambda: original())
    switches = Switches("TEST_COMPAT", strict=strict, off={"first": "TEST_COMPAT_FIRST=0"})
    engine = Engine(patches, switches, logging.getLogger("gemma4_compat"))
    engine.install()
    monkeypatch.setattr(gemma4_compat, "_started", engine)
    assert cli.main(["status"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "second blocked needs first, which is disabled by TEST_COMPAT_FIRST=0" in printed
    assert cli.main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["patches"]["second"]["state"] == "blocked"
    engine.retire()


@pytest.mark.parametrize("strict", [False, True])
def test_status_exit_code_where_a_patch_drifted(monkeypatch, capsys, strict):
    patch = Patch(name="gone", symptom="", affects=("packaging>=1",), links=())
    patch.replaces("json.tool", "no_such_function")(lambda original: original)
    switches = Switches("TEST_COMPAT", strict=strict)
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    engine = Engine([patch], switches, logging.getLogger("gemma4_compat"))
    engine.install()
    monkeypatch.setattr(gemma4_compat, "_started", engine)
    assert cli.main(["status"]) == 1
    printed = capsys.readouterr()
    assert "no_such_function" in (printed.err if strict else printed.out)


def test_status_says_untested_version(monkeypatch, capsys):
    newest = {"transformers": "5.0", "peft": "9999"}
    monkeypatch.setattr(gemma4_compat._engine._overview, "_newest", newest)
    cli.main(["status"])
    version = metadata.version("transformers")
    assert f"untested version: transformers {version} is newer" in capsys.readouterr().out
    cli.main(["status", "--json"])
    [note] = [n for n in json.loads(capsys.readouterr().out)["notes"] if "untested" in n]
    assert note.startswith(f"untested version: transformers {version} is newer")


def test_status_of_one_patch(capsys):
    assert cli.main(["status", "clippable_linear"]) == 0
    printed = capsys.readouterr().out
    entry = gemma4_compat.status()["clippable_linear"]
    assert printed.startswith(f"clippable_linear: {entry.state}\n")
    if entry.state is gemma4_compat.State.APPLIED:
        assert "\n  peft.tuners.tuners_utils.BaseTuner.inject_adapter\n" in printed
    assert cli.main(["status", "clippable_linear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replaces"] == list(entry.replaces)


# -- the frame of every command -------------------------------------------------------------------

#: valid arguments of each command for the tiny model and adapter, and the exit code
WORKS = {
    "status": ([], 0),
    "plan": (["MODEL", "--gpu", "8GiB"], 0),
    "map": (["MODEL", "--map", '{"model.vision_tower": "cpu", "": 0}'], 0),
    "scan": (["MODEL", "--targets", "q_proj,v_proj"], 0),
    "adapter": (["ADAPTER", "--model", "MODEL"], 0),
    "report": (["--model", "MODEL", "--adapter", "ADAPTER"], 0),
}
#: invalid arguments, and a part of the error message
WRONG = [
    ("status no_such_patch", "no patch is named 'no_such_patch'"),
    ("status clippable_lineer", "(did you mean clippable_linear?)"),
    ("stauts", "invalid choice: 'stauts' (choose from"),
    ("plan", "the following arguments are required: MODEL"),
    ("plan NONE --gpu 8GiB", "NONE: no such folder"),
    ("plan BROKEN --gpu 8GiB", "BROKEN/config.json: not JSON"),
    ("plan MODEL --gpu 8XB", "--gpu: '8XB' is not a size"),
    ("plan MODEL --gpu 8GiB --context 0", "--context: '0' is not a whole number of 1 or more"),
    ("plan MODEL --gpu 8GiB --quant nf5", "--quant: invalid choice: 'nf5'"),
    ("plan MODEL --gpu 8GiB --adapter NONE", "--adapter: NONE: no such file or folder"),
    ("map MODEL", "the following arguments are required: --map"),
    ("map NONE --map {}", "NONE: no such folder"),
    ("map BROKEN --map {}", "BROKEN/config.json: not JSON"),
    ("map MODEL --map {}", "--map: the device map is empty"),
    ('map MODEL --map {"":"gpu"}', "--map: \"\": 'gpu' is not a device (did you mean cpu?)"),
    ("scan MODEL", "the following arguments are required: --targets"),
    ("scan NONE --targets q_proj", "NONE: no such folder"),
    ("scan BROKEN --targets q_proj", "BROKEN/config.json: not JSON"),
    ("scan MODEL --targets (", "--targets: '(' is not a regular expression"),
    ("scan MODEL --targets q_proj --rank x", "--rank: 'x' is not a whole number of 1 or more"),
    ("adapter", "the following arguments are required: ADAPTER"),
    ("adapter NONE", "NONE: no such file or folder"),
    ("adapter BROKEN", "BROKEN: no adapter_model.safetensors"),
    ("adapter ADAPTER --model NONE", "--model: NONE: no such folder"),
    ("report --model NONE", "--model: NONE: no such folder"),
    ("report --adapter NONE", "--adapter: NONE: no such file or folder"),
    ('report --map {"":0}', "--map is checked against a model: name it with --model"),
    ("merge MODEL ADAPTER", "the following arguments are required: OUT"),
    ("merge NONE ADAPTER OUT", "NONE: no such folder"),
    ("merge BROKEN ADAPTER OUT", "BROKEN/config.json: not JSON"),
    ("merge MODEL ADAPTER BROKEN", "BROKEN: exists already (--force replaces it)"),
    ("demo --keep MODEL", "MODEL is not an empty folder"),
    ("run", "name a script or program, or a module after -m"),
    ("run --no-such-option script.py", "unrecognized arguments: --no-such-option"),
    ("--no-such-option", "the following arguments are required: COMMAND"),
]


@pytest.fixture
def paths(model_dir, adapter_dir, tmp_path, monkeypatch):
    """A folder in which MODEL and ADAPTER exist, BROKEN is damaged and NONE is missing."""
    (tmp_path / "MODEL").symlink_to(model_dir)
    (tmp_path / "ADAPTER").symlink_to(adapter_dir)
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN" / "config.json").write_text("{")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("command", "message"), WRONG)
def test_wrong_arguments_are_said_in_one_line(command, message, paths, capsys):
    assert run_command(*command.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith("gemma4-compat")
    assert message in line


def test_wrong_arguments_import_no_library(model_dir, adapter_dir, tmp_path):
    """Arguments that need the model's config are also checked before a library is imported."""
    commands = [text.split() for text, _ in WRONG if "BROKEN" not in text]
    places = {"MODEL": str(model_dir), "ADAPTER": str(adapter_dir)}
    commands = [[places.get(word, word) for word in command] for command in commands]
    code = f"""
import contextlib, io, sys
from gemma4_compat import cli
for command in {commands!r}:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            assert cli.main(command) == 2, command
        except SystemExit as stopped:
            assert stopped.code == 2, command
    assert not set(sys.modules) & {{*{WITH_TORCH}, "numpy"}}, command
"""
    ran = python("-c", code, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("command", "arguments", "code"),
    [
        *((command, *expected) for command, expected in WORKS.items() if command != "report"),
        ("status", ["-v"], 0),
        ("plan", ["MODEL", "--gpu", "1MiB", "--train"], 1),
        ("map", ["MODEL", "--map", '{"": 0, "model.vision": "cpu", "lm_heads": "cpu"}'], 1),
        ("map", ["MODEL", "--map", "model.vision_tower=cpu"], 1),
        ("scan", ["MODEL", "--targets", "no_such_layer"], 1),
        ("scan", ["MODEL", "--targets", ".*vision_tower.*"], 1),
        ("scan", ["MODEL", "--targets", "all-linear"], 0),
    ],
)
def test_as_wide_as_the_terminal(command, arguments, code, paths, capsys, monkeypatch):
    cli.main([command, *arguments, "--json"])
    to_paste = json.loads(capsys.readouterr().out).get("code") or "no code"
    for columns in (60, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert cli.main([command, *arguments]) == code
        printed = capsys.readouterr()
        assert printed.err == ""
        lines = printed.out.replace(to_paste, "").splitlines()
        # Single words are not wrapped, so that they can be copied.
        assert [line for line in lines if len(line) > columns and " " in line.strip()] == []


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", ["help", *(command.name for command in cli.COMMANDS)])
def test_help_is_as_wide_as_the_terminal(command, columns, capsys, monkeypatch):
    texts = []
    for width in (columns, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        assert run_command(command, *["--help"] * (command != "help")) == 0
        texts.append(capsys.readouterr().out)
    long = [line for line in texts[0].splitlines() if len(line) > columns]
    assert all(line.startswith("  gemma4-compat ") for line in long)  # to be copied
    assert texts[0].split() == texts[1].split()  # no word is cut


@pytest.mark.parametrize("command", WORKS)
def test_json_is_the_same_for_programs(command, paths, capsys):
    arguments, code = WORKS[command]
    assert cli.main([command, *arguments, "--json"]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)
    assert isinstance(found, dict)
    assert found.get("ok", True) is True


@pytest.mark.parametrize(
    "command", [c for c in cli.COMMANDS if c.name != "run"], ids=lambda command: command.name
)
def test_interrupted(command, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    stopped = dataclasses.replace(command, run=interrupted, needs=lambda options: ())
    assert stopped.execute(argparse.Namespace(json=False)) == 130
    line = f"gemma4-compat {command.name}: interrupted{command.stopped}"
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize(
    ("gpu", "code", "verdict"),
    [("8GiB", 0, "\033[32mfits on"), ("1MiB", 1, "\033[31mdoes NOT")],
)
def test_colour_of_the_verdict(gpu, code, verdict, paths, capsys, monkeypatch):
    command = ["plan", "MODEL", "--gpu", gpu]
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(command) == code
    plain = capsys.readouterr().out
    assert "\033" not in plain  # the output is a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(command) == code
    colored = capsys.readouterr().out
    assert verdict in colored
    assert re.sub("\033\\[\\d+m", "", colored) == plain
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert cli.main(command) == code
        assert capsys.readouterr().out == plain
        monkeypatch.delenv(name)


def test_help_with_examples(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"\n    {command.name} " in printed
    assert "\nexamples:\n  gemma4-compat status" in printed


# -- without the libraries ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Runs the command line with only the dependencies of this package installed."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("wrapt", "packaging", "gemma4_compat"):
        source = Path(importlib.util.find_spec(name).origin).parent
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))

    def run(*arguments):
        # -S: without site-packages
        return python(*command(*arguments), PYTHONPATH="", COLUMNS="80")

    def command(*arguments):
        code = f"import sys; sys.path.append({str(folder)!r}); from gemma4_compat.cli import main; "
        return ["-S", "-c", f"{code}sys.exit(main({list(arguments)!r}))"]

    run.command = command
    return run


def test_help_needs_no_libraries(bare):
    for arguments in (["--help"], ["help"], ["run", "--help"], ["demo", "--help"], ["-V"]):
        ran = bare(*arguments)
        assert ran.returncode == 0
        assert ran.stderr == ""


def test_help_imports_no_libraries():
    code = "import sys, atexit; from gemma4_compat import cli; atexit.register(lambda: "
    code += f"print(set(sys.modules) & {{*{WITH_TORCH}, 'numpy'}})); cli.main(['-h'])"
    assert python("-c", code).stdout.splitlines()[-1] == "set()"


def test_status_without_the_libraries(bare):
    ran = bare("status")
    assert ran.returncode == 1
    assert "NOT well: torch is not installed; transformers is not installed" in ran.stdout
    what_to_do = "pip install torch transformers accelerate peft bitsandbytes"
    assert what_to_do in " ".join(ran.stdout.split())
    assert not set(PATCHES) & set(ran.stdout.split())
    assert bare("status", "-v").stdout.count("not installed") >= len(WITH_TORCH) + len(PATCHES)


def test_demo_without_the_libraries(bare):
    ran = bare("demo")
    assert ran.returncode == 2
    [line] = ran.stderr.splitlines()
    assert "torch, transformers, accelerate, peft, bitsandbytes" in line
    assert line.endswith(": pip install torch transformers accelerate peft bitsandbytes")


# -- run ----------------------------------------------------------------------------------------

PROGRAM = """
import atexit, dataclasses, inspect, pickle, sys, threading

@dataclasses.dataclass
class Config:
    rate: float = 0.5

def show():
    print("argv", sys.argv)
    print("path", sys.path[0])
    print("main", __name__, __file__, __package__, getattr(__spec__, "name", None), __doc__)
    print("cached", __cached__, type(__loader__).__name__)
    print("modules", sys.modules["__main__"].Config is Config)
    print("pickle", *(pickle.loads(pickle.dumps(thing)) for thing in (Config(1.0), Config)))
    print("source", inspect.getsource(Config).count("rate"))
    print("names", sorted(globals().keys() - {"__annotations__"}))

if __name__ == "__main__":
    show()
    atexit.register(lambda: print("at exit", sys.modules["__main__"].Config.__name__))
    threading.Timer(0.1, lambda: print("thread", sys.modules["__main__"].__file__)).start()
    sys.exit(len(sys.argv))
"""


@pytest.fixture
def program(tmp_path):
    """A folder with a script, a link to it, and a package with a main module."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "package").mkdir()
    for name in ("__init__", "train", "__main__"):
        (tmp_path / "package" / f"{name}.py").write_text(PROGRAM if name != "__init__" else "")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.py").symlink_to(tmp_path / "train.py")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py"],
        ["train.py", "-m", "--json", "--", "-h"],
        ["./package/train.py", "x"],
        ["elsewhere/link.py"],
        ["package"],
        ["-m", "package.train", "run", "-m", "--", "x"],
        ["-m", "package", "--help"],
        ["-m", "package.missing"],
    ],
    ids=" ".join,
)
def test_run_is_like_python(program, arguments):
    plain = python(*arguments, cwd=program)
    with_us = compat("run", *arguments, cwd=program)
    assert with_us.stdout == plain.stdout
    assert with_us.stderr == plain.stderr
    assert with_us.returncode == plain.returncode
    assert not (program / "__pycache__").exists()


def test_double_dash_before_the_program(program):
    plain = python("train.py", "--", "-x", cwd=program)
    assert compat("run", "--", "train.py", "--", "-x", cwd=program).stdout == plain.stdout


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit",
        "raise SystemExit(7)",
        "raise SystemExit('no good')",
        "def f():\n    1 / 0\nf()",
        "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e",
        "raise KeyboardInterrupt",
        "x = (",
        "import no_such_module",
        "import sys\nsys.excepthook = lambda *error: print('my hook', error[0])\n1 / 0",
    ],
)
def test_exits_and_tracebacks_are_like_pythons(tmp_path, body):
    (tmp_path / "script.py").write_text(body)
    plain = python(tmp_path / "script.py")
    with_us = compat("run", tmp_path / "script.py")
    assert with_us.stdout == plain.stdout
    assert with_us.stderr == plain.stderr
    assert with_us.returncode == plain.returncode


def test_the_program_is_patched(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys; import gemma4_compat\n"
        "print(sorted(status.name for status in gemma4_compat.status()))"
    )
    ran = compat("run", tmp_path / "script.py")
    assert ran.stdout.strip() == str(sorted(PATCHES))


def test_run_needs_a_program():
    ran = compat("run")
    assert ran.returncode == 2
    assert "name a script" in ran.stderr
    ran = compat("run", "missing.py")
    assert ran.returncode == 2
    assert "can't open file" in ran.stderr
    ran = compat("run", "missing")
    assert ran.returncode == 2
    assert ran.stderr.startswith("gemma4-compat run: missing is neither a file nor a program")
    assert compat("run", "--no-such-option", "script.py").returncode == 2


CHILDREN = """
import sys
imported_first = "gemma4_compat" in sys.modules
import multiprocessing as mp, os

class Thing:
    pass

def child(depth):
    if depth:
        return imported_first, *grandchild()
    return imported_first, Thing()

def grandchild():
    with mp.get_context(sys.argv[1]).Pool(1) as pool:
        return pool.apply(child, (0,))

if __name__ == "__main__":
    os.chdir("/")
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(1, mp_context=mp.get_context(sys.argv[1])) as pool:
        first, second, thing = pool.submit(child, 1).result()
    print(imported_first, first, second, type(thing) is Thing)
"""


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_children_are_patched(tmp_path, method, as_module):
    (tmp_path / "children.py").write_text(CHILDREN)
    target = ["-m", "children"] if as_module else ["children.py"]
    ran = compat("run", *target, method, cwd=tmp_path)
    assert ran.stderr == ""
    assert ran.stdout.split() == ["True"] * 4


DISTRIBUTED = """
import gemma4_compat, os, sys
import torch, torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.tensor(float(os.environ["RANK"]) + 1)
    dist.all_reduce(total)
    # One file for each process: printed lines of two processes may mix.
    with open(os.path.join(sys.path[0], os.environ["RANK"]), "w") as file:
        print(total.item(), sys.argv[1:], sys.path[0], file=file)
    dist.destroy_process_group()
"""


def test_under_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "gemma4_compat", "run", tmp_path / "train.py", "--epochs", "3"]
    ran = python(*launch, *program, OMP_NUM_THREADS="1")
    assert ran.returncode == 0, ran.stderr
    for rank in ("0", "1"):
        assert (tmp_path / rank).read_text() == f"3.0 ['--epochs', '3'] {tmp_path}\n"


def test_a_reader_that_has_seen_enough(bare):
    command = [sys.executable, *bare.command("status")]
    options = {"env": {**os.environ, "PYTHONPATH": ""}, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, **options)
    process.stdout.close()
    _, error = process.communicate()
    assert b"Error" not in error
    assert process.returncode == 141


def test_what_messages_name_exists():
    """The commands and functions that messages of patches name exist."""
    folder = Path(gemma4_compat.__file__).parent / "patches"
    text = "".join(file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))
    commands = {command.name for command in cli.COMMANDS}
    assert {"map", "merge", "plan"} <= set(re.findall(r"gemma4-compat (\w+)", text)) <= commands
    functions = set(re.findall(r"gemma4_compat\.inspection\.(\w+)\(", text))
    assert functions == {"inspect_model"}
    for name in functions:
        assert callable(getattr(importlib.import_module("gemma4_compat.inspection"), name))


def test_interrupted_while_the_hub_is_asked(monkeypatch, capsys):
    def interrupted(self, name):
        raise KeyboardInterrupt

    monkeypatch.setattr("gemma4_compat.files.hub.Repository.file", interrupted)
    assert run_command("plan", "google/gemma-4-E4B-it", "--gpu", "8GiB") == 130
    assert capsys.readouterr().err == "gemma4-compat plan: interrupted\n"


def test_an_interrupt_that_a_library_turns_into_an_error(monkeypatch, capsys, model_dir):
    import transformers

    def interrupted(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("Could not import module") from error

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", interrupted)
    assert run_command("scan", model_dir, "--targets", "q_proj") == 130
    assert capsys.readouterr().err == "gemma4-compat scan: interrupted\n"
