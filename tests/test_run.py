"""``gemma4-compat run``: the programs that it finds, and the processes that they start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import gemma4_compat
from gemma4_compat import launcher
from gemma4_compat.versions import WITH_TORCH
from tests.support import run_process

ROOT = Path(gemma4_compat.__file__).parents[1]
FOLDER = ROOT / "gemma4_compat" / "_sitecustomize"
posix = pytest.mark.skipif(os.name == "nt", reason="scripts with #! lines")

#: Prints what a process has.
SHOW = f"""
import json, sys
names = [name for name in sys.modules if name.partition(".")[0] == "gemma4_compat"]
site = sys.modules.get("sitecustomize")
print(json.dumps({{
    "patched": "gemma4_compat" in names,
    "names": len(names),
    "hooks": [type(finder).__name__ for finder in sys.meta_path].count("_FirstImport"),
    "libraries": sorted({{*{WITH_TORCH!r}}} & set(sys.modules)),
    "path": sys.path,
    "sitecustomize": getattr(site, "__file__", None),
}}), flush=True)
"""


def execute(command, cwd=None, path=(), **variables):
    """Run a command with the package and the libraries of this process, without our switches."""
    inherited = [
        os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p
    ]
    entries = dict.fromkeys([*map(str, path), str(ROOT), *inherited])
    return run_process(command, entries, cwd, **variables)


def python(*arguments, **options):
    return execute([sys.executable, *arguments], **options)


def run(*arguments, **options):
    return python("-m", "gemma4_compat", "run", *arguments, **options)


def shown(ran):
    """What SHOW printed in each process."""
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def is_patched(process):
    return process["patched"] and process["hooks"] == 1 and process["libraries"] == []


@pytest.fixture
def show(tmp_path):
    path = tmp_path / "show.py"
    path.write_text(SHOW)
    return path


# -- which program --------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path):
    """Install a program into a folder for PATH: its text after the line "#!" of a Python."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(text, name="tool", first_line=f"#!{sys.executable}"):
        (folder / name).write_text(f"{first_line}\n{text}")
        (folder / name).chmod(0o755)
        return folder / name

    return install


def on_path(*folders):
    """PATH with these folders in front."""
    return os.pathsep.join([*map(str, folders), os.environ["PATH"]])


CONSOLE_SCRIPT = """
import sys
if __name__ == "__main__":
    print(sys.argv, sys.path[0], __name__, __file__, "gemma4_compat" in sys.modules)
    sys.exit(7)
"""


@posix
@pytest.mark.parametrize(
    "first_line",
    [f"#!{sys.executable}", f'#!/bin/sh\nexec {sys.executable} $0.py "$@"'],
    ids=["python", "a shell starts it"],
)
def test_a_console_script_runs_as_in_a_shell(installed, first_line, tmp_path):
    script = installed(CONSOLE_SCRIPT, first_line=first_line)
    if first_line.endswith('.py "$@"'):
        script.write_text(first_line + "\n")
        (script.parent / "tool.py").write_text(CONSOLE_SCRIPT)
    environment = {"PATH": on_path(script.parent)}
    plain = execute(["tool", "--lr", "1"], cwd=tmp_path, **environment)
    with_us = run("tool", "--lr", "1", cwd=tmp_path, **environment)
    assert plain.stdout.endswith("__main__ " + plain.stdout.split()[-2] + " False\n")
    assert with_us.stdout == plain.stdout.replace("False", "True")
    assert (with_us.stderr, with_us.returncode) == (plain.stderr, plain.returncode) == ("", 7)


@pytest.mark.parametrize("command", [["tool.py"], ["tool"], ["-m", "tool"]])
def test_a_script_runs_as_python_runs_it(command, tmp_path):
    """Arguments, path, name, the traceback of an error and the exit code."""
    (tmp_path / "tool").mkdir()
    for file in ("tool.py", "tool/__main__.py"):
        (tmp_path / file).write_text(CONSOLE_SCRIPT.replace("sys.exit(7)", "1 / 0"))
    command = [*command, "--lr", "1"]
    plain, with_us = python(*command, cwd=tmp_path), run(*command, cwd=tmp_path)
    assert "ZeroDivisionError" in plain.stderr
    assert with_us.stdout == plain.stdout.replace("False", "True")
    assert (with_us.stderr, with_us.returncode) == (plain.stderr, plain.returncode)


@posix
def test_a_file_wins_over_a_console_script(installed, tmp_path):
    path = on_path(installed("print('on PATH')").parent)
    assert run("tool", cwd=tmp_path, PATH=path).stdout == "on PATH\n"
    (tmp_path / "tool").mkdir()  # a clone of the tool's repository
    assert run("tool", cwd=tmp_path, PATH=path).stdout == "on PATH\n"
    (tmp_path / "tool" / "__main__.py").write_text("print('a folder')")
    assert run("tool", cwd=tmp_path, PATH=path).stdout == "a folder\n"
    shutil.rmtree(tmp_path / "tool")
    (tmp_path / "tool").write_text("print('a file')")
    assert run("tool", cwd=tmp_path, PATH=path).stdout == "a file\n"


def refused(*arguments, **options):
    """The only line that a run prints which does not start."""
    ran = run(*arguments, **options)
    assert (ran.returncode, ran.stdout) == (2, "")
    [line] = ran.stderr.splitlines()
    assert line.startswith("gemma4-compat run: ")
    return line


def test_a_missing_program(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("no-such-tool", "./no-such-tool", "folder"):
        line = refused(name, cwd=tmp_path)
        assert line.endswith(f": {name} is neither a file nor a program on PATH")
    assert "can't open file" in run("no-such.py").stderr


@pytest.fixture
def other_python(tmp_path):
    """The Python of another virtual environment, without wrapt."""
    command = [sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"]
    subprocess.run(command, check=True)
    return tmp_path / "other" / ("Scripts" if os.name == "nt" else "bin") / "python"


@posix
def test_programs_that_are_not_python(show, tmp_path):
    """The shell's own exit code and messages; a pipe that is closed ends the writer silently."""
    line = f'"{sys.executable}" show.py; yes | head -n 1; exit 5'
    ran = run("sh", "-c", line, cwd=tmp_path)
    first, second = ran.stdout.splitlines()
    assert is_patched(json.loads(first))
    assert (second, ran.stderr, ran.returncode) == ("y", "", 5)
    (tmp_path / "train.sh").write_text(f"#!/bin/sh\n{line}")
    (tmp_path / "train.sh").chmod(0o755)
    assert run("./train.sh", cwd=tmp_path).returncode == 5


@posix
def test_a_program_that_nothing_can_run(installed):
    script = installed("", first_line="no line for the system")
    line = refused("tool", PATH=on_path(script.parent))
    assert line.endswith(f"cannot run {script}: Exec format error")


@posix
def test_python_itself(show):
    assert is_patched(*shown(run(sys.executable, show)))


def test_where_a_process_cannot_be_replaced():
    assert launcher._run_and_wait([sys.executable, "-c", "raise SystemExit(3)"]) == 3


# -- the processes that the program starts --------------------------------------------------------

STARTS = {
    "subprocess": "subprocess.run([sys.executable, 'show.py'])",
    "another folder": "subprocess.run([sys.executable, os.path.abspath('show.py')], cwd='/')",
    "a shell": "os.system(f'\"{sys.executable}\" show.py')",
    "exec": "os.execv(sys.executable, [sys.executable, 'show.py'])",
    "posix_spawn": "os.waitpid(os.posix_spawn(sys.executable, ['p', 'show.py'], os.environ), 0)",
    "a grandchild": "subprocess.run([sys.executable, '-c', f'import subprocess; "
    'subprocess.run([{sys.executable!r}, "show.py"])\'])',
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_processes_that_the_program_starts(show, tmp_path, start):
    if "posix_spawn" in start and not hasattr(os, "posix_spawn"):
        pytest.skip("no posix_spawn")
    (tmp_path / "program.py").write_text(f"import os, subprocess, sys\n{start}\n")
    [plain] = shown(python("program.py", cwd=tmp_path))
    ran = run("program.py", cwd=tmp_path)
    [child] = shown(ran)
    assert not plain["patched"]
    assert is_patched(child)
    assert child["path"] == plain["path"]
    assert child["sitecustomize"] == plain["sitecustomize"]
    assert ran.stderr == ""


def test_from_a_clone_that_is_not_installed(show, tmp_path):
    """Python finds the package in the current folder; the child has another current folder."""
    (tmp_path / "gemma4_compat").symlink_to(ROOT / "gemma4_compat")
    code = (
        "import os, subprocess, sys\nos.chdir('/')\nsubprocess.run([sys.executable, *sys.argv[1:]])"
    )
    (tmp_path / "program.py").write_text(code)
    command = [sys.executable, "-m", "gemma4_compat", "run", "program.py", show]
    [child] = shown(execute(command, cwd=tmp_path, PYTHONPATH=""))
    assert is_patched(child)
    assert str(tmp_path) in child["path"]


@pytest.fixture
def parent(show, tmp_path):
    """A program that starts SHOW with the options of Python that are its arguments."""
    code = "import subprocess, sys\nsubprocess.run([sys.executable, *sys.argv[1:], 'show.py'])"
    (tmp_path / "parent.py").write_text(code)
    return tmp_path / "parent.py"


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_a_child_that_runs_without_sitecustomize(parent, option):
    plain, with_us = (
        python(parent, option, cwd=parent.parent),
        run(parent, option, cwd=parent.parent),
    )
    [expected], [found] = shown(plain), shown(with_us)
    expected["path"] += [str(FOLDER)] * (option == "-S")
    assert sorted(found.pop("path")) == sorted(expected.pop("path"))
    assert found == expected
    assert not found["patched"]
    assert with_us.stderr == plain.stderr == ""


SPAWNS = """
import multiprocessing, sys

def child():
    print("gemma4_compat" in sys.modules, flush=True)

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    process = multiprocessing.Process(target=child)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_run_itself_under_such_an_option(tmp_path, option):
    """The program is another process, without this option."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    code = f"import sys; sys.path[:] = {[str(ROOT), *filter(None, sys.path)]!r}; "
    code += f"from gemma4_compat.cli import main; main(['run', {str(tmp_path / 'spawns.py')!r}])"
    assert python(option, "-c", code).stdout == "True\n"


def test_switches_reach_the_children(tmp_path):
    (tmp_path / "child.py").write_text(
        "import gemma4_compat\n"
        "states = {each.name: each.state.value for each in gemma4_compat.status()}\n"
        "print(gemma4_compat._engine._switches.strict, states['peft_redispatch'], flush=True)\n"
    )
    code = "import subprocess, sys\nsubprocess.run([sys.executable, 'child.py'])"
    (tmp_path / "program.py").write_text(code)
    switches = {"GEMMA4_COMPAT_STRICT": "1", "GEMMA4_COMPAT_PEFT_REDISPATCH": "0"}
    assert run("program.py", cwd=tmp_path, **switches).stdout == "True disabled\n"
    assert run("program.py", cwd=tmp_path, GEMMA4_COMPAT="0").stdout == "False disabled\n"


# -- PYTHONPATH and sitecustomize -----------------------------------------------------------------

SHOW_PYTHONPATH = """
import gemma4_compat, os, sys
gemma4_compat.status()
print(os.environ["PYTHONPATH"].split(os.pathsep), len(sys._version_gated_patch_engines), flush=True)
"""


def test_run_in_run_and_a_program_that_imports_the_package(tmp_path):
    (tmp_path / "show.py").write_text(SHOW_PYTHONPATH)
    once = run("show.py", cwd=tmp_path)
    code = "import gemma4_compat, subprocess, sys\n"
    code += "subprocess.run([sys.executable, '-m', 'gemma4_compat', 'run', 'show.py'])"
    (tmp_path / "again.py").write_text(code)
    again = run("again.py", cwd=tmp_path)
    assert once.stdout == again.stdout
    assert (once.stdout.count(str(FOLDER)), once.stdout[-3:]) == (1, " 1\n")
    assert once.stderr == again.stderr == ""


@pytest.mark.parametrize(
    ("pythonpath", "expected"),
    [
        (None, [FOLDER]),
        ("", [FOLDER]),
        ("/a::relative", [FOLDER, "/a", "", "relative"]),
        (f"/a:{FOLDER}:/b", [FOLDER, "/a", "/b"]),
        (f"/a:{ROOT}", [FOLDER, "/a", ROOT]),
    ],
)
def test_pythonpath(monkeypatch, pythonpath, expected):
    monkeypatch.setenv("PYTHONPATH", "")  # restored afterwards, also if it was not set
    monkeypatch.delenv("PYTHONPATH")
    if pythonpath is not None:
        monkeypatch.setenv("PYTHONPATH", pythonpath.replace(":", os.pathsep))
    launcher._patch_children()
    # A clone has to be on the children's path.
    clone = ROOT.name not in ("site-packages", "dist-packages") and ROOT not in expected
    expected = [*map(str, expected), *([str(ROOT)] if clone else [])]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == expected


def test_a_folder_that_pythonpath_cannot_name(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", "as before")
    monkeypatch.setattr(launcher, "_HERE", f"/a{os.pathsep}b/gemma4_compat")
    assert launcher.run(["show.py"], as_module=False) == 2
    assert os.environ["PYTHONPATH"] == "as before"
    assert "cannot patch the program" in capsys.readouterr().err


OTHERS = {
    "prints": "import sys; print(__name__, __file__, sys.path); sys.ours = 1",
    "raises": "print('once'); 1 / 0",
    "lacks a module": "print('once'); import no_such_module",
    "raises ImportError": "print('once'); raise ImportError('x', name='sitecustomize')",
    "exits": "print('once'); raise SystemExit(3)",
    "is replaced": "import sys, json; sys.modules[__name__] = json",
}


@pytest.fixture
def other(tmp_path):
    """A folder for PYTHONPATH with another sitecustomize."""
    folder = tmp_path / "other"
    folder.mkdir()

    def write(source, name="sitecustomize.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
        return folder

    return write


def child(path, *arguments, **options):
    """A child as the program starts it: with our folder in front of PYTHONPATH."""
    return python(*arguments, path=[FOLDER, *path], **options)


@pytest.mark.parametrize("source", OTHERS.values(), ids=OTHERS)
def test_another_sitecustomize_runs_once(other, show, source):
    folder = other(source)
    plain, with_us = python(show, path=[folder]), child([folder], show)
    assert with_us.returncode == plain.returncode
    # Between these lines there may be a traceback, with the line of ours that imports the other.
    lines, expected = with_us.stderr.splitlines(), plain.stderr.splitlines()
    assert (lines[:1], lines[-1:]) == (expected[:1], expected[-1:])
    # All but the last line, which SHOW prints, is printed by the other one.
    assert with_us.stdout.splitlines()[:-1] == plain.stdout.splitlines()[:-1]
    if plain.returncode == 0:
        [expected], [found] = shown(plain), shown(with_us)
        assert is_patched(found)
        assert found["sitecustomize"] == expected["sitecustomize"]
        assert found["path"] == expected["path"]


def test_another_sitecustomize_that_is_a_package(other, show):
    folder = other("from . import part", "sitecustomize/__init__.py")
    other("print('part')", "sitecustomize/part.py")
    ran = child([folder], show)
    assert ran.stdout.startswith("part\n{")
    assert shown(ran)[0]["sitecustomize"] == str(folder / "sitecustomize" / "__init__.py")


def test_imported_in_another_way():
    """It does not import itself again and again."""
    code = "import gemma4_compat._sitecustomize.sitecustomize as ours; print(ours._is_on_path)"
    assert python("-c", code).stdout == "False\n"


def test_the_program_has_no_sitecustomize_of_ours():
    """Where the interpreter has none, the program has none either."""
    code = "import sys; print('sitecustomize' in sys.modules)\n"
    code += "import importlib.util as i; print(i.find_spec('sitecustomize'))"
    assert child([], "-c", code).stdout == python("-c", code).stdout


#: As other packages do it: hide the own folder, import the next, and put the folder back.
CHAINED = """
import os, sys
print("chained")
index = sys.path.index(os.path.dirname(__file__))
folder = sys.path.pop(index)
this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = this
finally:
    sys.path.insert(index, folder)
"""


@pytest.mark.parametrize("with_third", [False, True])
@pytest.mark.parametrize("ours_first", [False, True])
def test_another_sitecustomize_that_imports_the_next(other, show, tmp_path, ours_first, with_third):
    folders = [other(CHAINED), *([tmp_path / "third"] if with_third else [])]
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "sitecustomize.py").write_text("print('third')")
    plain = python(show, path=folders)
    ran = python(
        show, path=[FOLDER, *folders] if ours_first else [folders[0], FOLDER, *folders[1:]]
    )
    [found], [expected] = shown(ran), shown(plain)
    assert ran.stdout.splitlines()[:-1] == ["chained", "third"][: 1 + with_third]
    assert is_patched(found)
    assert (found["path"], found["sitecustomize"]) == (expected["path"], expected["sitecustomize"])
    assert ran.stderr == ""


@pytest.mark.parametrize("strict", ["", "1"])
def test_a_child_of_another_python(other_python, show, strict):
    """It has no gemma4_compat or no wrapt: it runs unharmed."""
    for path in ([], [ROOT]):
        variables = {"PYTHONPATH": os.pathsep.join(map(str, [FOLDER, *path]))}
        ran = execute([other_python, show], GEMMA4_COMPAT_STRICT=strict, **variables)
        [found] = shown(ran)
        assert (found["names"], found["hooks"]) == (0, 0)
        assert str(FOLDER) not in found["path"]
        lines = ran.stderr.splitlines()
        assert len(lines) == bool(strict)
        for line in lines:
            assert line.startswith(f"gemma4-compat: {other_python} runs without the patches: Modul")


@pytest.mark.parametrize("source", ["x = (", "1 / 0", "from . import part; raise TypeError('old')"])
def test_a_child_that_is_too_old(tmp_path, show, source):
    (tmp_path / "gemma4_compat").mkdir()
    (tmp_path / "gemma4_compat" / "__init__.py").write_text(source)
    (tmp_path / "gemma4_compat" / "part.py").write_text("")
    ran = child([tmp_path], show)
    [found] = shown(ran)
    assert (found["names"], ran.stderr) == (0, "")


def test_the_folder_of_sitecustomize():
    """It holds nothing else that a child could import, and the package does not import it."""
    assert {path.name for path in FOLDER.iterdir()} - {"__pycache__"} == {"sitecustomize.py"}
    code = "import gemma4_compat.cli, gemma4_compat.launcher, sys; "
    code += "print([name for name in sys.modules if '_sitecustomize' in name], sys.path)"
    ran = python("-c", code)
    assert ran.stdout.startswith("[] [")
    assert str(FOLDER) not in ran.stdout


# -- the programs that people train with ----------------------------------------------------------


def program(name):
    """The installed program of this Python."""
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    path = shutil.which(name, path=os.pathsep.join(folders))
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def test_what_rounds_differently(tmp_path):
    code = """
import gemma4_compat
print(gemma4_compat.status()["one_row_4bit"].state)
"""
    (tmp_path / "show.py").write_text(code)
    for options, state in ((["--fast"], "armed"), ([], "optional")):
        ran = run(*options, "show.py", cwd=tmp_path)
        assert (ran.stdout.strip(), ran.returncode) == (state, 0), ran.stderr
    ran = run("--fast", "show.py", cwd=tmp_path, GEMMA4_COMPAT_FAST="0")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "GEMMA4_COMPAT_FAST=0 contradicts --fast: unset the variable" in ran.stderr


@pytest.mark.parametrize(
    ("name", "options", "processes"),
    [
        ("accelerate", ["launch", "--cpu", "--num_processes", "1", "--num_machines", "1"], 1),
        ("torchrun", ["--standalone", "--nproc-per-node", "2"], 2),
        ("deepspeed", ["--num_gpus", "2"], 2),
    ],
)
def test_launchers(name, options, processes, tmp_path):
    folder = os.path.dirname(program(name))
    # One file for each process: printed lines of two processes may mix.
    code = SHOW.replace("flush=True", "file=open(f'{__import__(\"os\").getpid()}.json', 'w')")
    (tmp_path / "train.py").write_text(code)
    variables = {"PATH": on_path(folder), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ran = run(name, *options, "train.py", cwd=tmp_path, **variables)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(found) == processes
    assert all(map(is_patched, found))


TRL = """
trl sft --model_name_or_path model --dataset_name data --output_dir out --use_cpu --use_peft
--lora_target_modules q_proj v_proj --max_steps 2 --learning_rate 0.01 --max_length 32
--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing false
--bf16 false --save_strategy no --report_to none
"""


@pytest.mark.slow
def test_trl(model_dir, tmp_path):
    """``trl sft`` trains in a process of its own, and there the patches and switches act."""
    pytest.importorskip("trl", reason="trl is not installed")
    from safetensors.torch import load_file

    from tests.test_training import sentences, tokenizer

    folder = os.path.dirname(program("trl"))
    shutil.copytree(model_dir, tmp_path / "model")
    words = tokenizer()
    words.save_pretrained(tmp_path / "model")
    processor = {"processor_class": type(words).__name__}
    (tmp_path / "model" / "processor_config.json").write_text(json.dumps(processor))
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": sentence}) for sentence in sentences()]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    variables = {"cwd": tmp_path, "PATH": on_path(folder), "OMP_NUM_THREADS": "1"}
    variables |= {"HF_HUB_OFFLINE": "1"}
    off = run(*TRL.split(), **variables, GEMMA4_COMPAT_CLIPPABLE_LINEAR="0")
    assert off.returncode == 1
    assert "ValueError: Target module Gemma4ClippableLinear(" in off.stderr
    on = run(*TRL.split(), **variables)
    assert on.returncode == 0, on.stderr
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(".vision_tower." in name for name in adapter)
    trained = [t for name, t in adapter.items() if "language_model" in name and "lora_B" in name]
    assert trained
    assert all(tensor.isfinite().all() and tensor.any() for tensor in trained)
