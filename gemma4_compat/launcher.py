"""``gemma4-compat run``: runs a program as Python or the operating system would run it.

A Python program runs in this process.  The Python processes that the program starts import this
package at their start, through ``_sitecustomize/sitecustomize.py``.
"""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import subprocess
import sys
import types
import zipfile
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from typing import Any

from .errors import InputError
from .programs import Program, find

_HERE = os.path.dirname(__file__)
_OURS = (_HERE, os.path.join(_HERE, "cli"))


def run(program: list[str], *, as_module: bool) -> int:
    """Do what ``python PROGRAM``, ``python -m PROGRAM`` or, for other programs, a shell does."""
    if not as_module:
        try:
            found = find(program[0], program[1:])
        except InputError as error:
            _say(str(error))
            return 2
        program = [found.path, *program[1:]]
    _patch_children()
    if as_module or found.is_python:
        _warn_of_inherited_option()
        _run_here(program, as_module=as_module)
        return 0
    return _run_there(found, program)


def _say(message: str) -> None:
    print(f"gemma4-compat run: {message}", file=sys.stderr, flush=True)


def _patch_children() -> None:
    """Make the Python processes that the program starts import this package."""
    package = os.path.abspath(_HERE)
    folder, root = os.path.join(package, "_sitecustomize"), os.path.dirname(package)
    if os.pathsep in package:
        _say(
            "Python processes that the program starts are not patched: "
            f"PYTHONPATH cannot name {root}, as that has a {os.pathsep!r}"
        )
        return
    path = os.environ.get("PYTHONPATH")
    entries = [entry for entry in path.split(os.pathsep) if entry != folder] if path else []
    # A clone that is not installed.
    if os.path.basename(root) not in ("site-packages", "dist-packages") and root not in entries:
        entries.append(root)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *entries])


def _warn_of_inherited_option() -> None:
    flags = sys.flags
    options = {"-I": flags.isolated, "-E": flags.ignore_environment, "-S": flags.no_site}
    for option, is_set in options.items():
        if is_set:
            _say(
                f"Python processes that multiprocessing starts inherit {option}, "
                "and are not patched unless they are forked"
            )
            return


def _run_there(program: Program, command: list[str]) -> int:
    """Run a program in machine code or of another language, such as bash, or Python itself."""
    if program.option:
        _say(f"Python's option {program.option} keeps the patches out of {program.path}")
    try:
        if os.name == "nt":
            return _run_and_wait(command)
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and a program inherits that
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execv(command[0], command)
    except OSError as error:
        _say(f"cannot run {command[0]}: {error.strerror}")
        return 2


def _run_and_wait(command: list[str]) -> int:
    """Run a program on Windows, which cannot replace a process by another."""
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the program gets it, too
                continue


def _run_here(program: list[str], *, as_module: bool) -> None:
    """Run a Python program in this process."""
    # Not runpy's public functions: they replace __main__ by a temporary module, and remove that
    # module before the program's threads and exit handlers have ended.
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins)
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # the alias for objects that children send back
        sys.modules["__mp_main__"] = module
    _hide_our_frames()
    sys.argv = program.copy()
    # The interpreter itself calls this function for -m, and for a directory or zip file.
    run_module_as_main: Any = vars(runpy)["_run_module_as_main"]
    if as_module:
        _set_first_path(os.getcwd())
        run_module_as_main(program[0])
    elif os.path.isdir(program[0]) or zipfile.is_zipfile(program[0]):
        _set_first_path(os.path.abspath(program[0]))
        run_module_as_main("__main__", alter_argv=False)
    else:
        _set_first_path(os.path.dirname(os.path.realpath(program[0])))
        _run_script(module, os.path.join(os.getcwd(), program[0]))


def _run_script(module: types.ModuleType, path: str) -> None:
    loader: SourceFileLoader | SourcelessFileLoader
    if path.endswith(".pyc"):
        loader = SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
        assert code is not None
    else:
        loader = SourceFileLoader("__main__", path)
        # Not get_code(): it would write a __pycache__ beside the script.
        code = loader.source_to_code(loader.get_data(path), path)
    vars(module).update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, vars(module))


def _set_first_path(entry: str) -> None:
    """Replace the first entry of sys.path: the interpreter set it for *our* entry point."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11+
        sys.path[0] = entry


def _hide_our_frames() -> None:
    """Start the traceback of an uncaught exception at the program, as Python does."""
    show = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
    ) -> None:
        while traceback is not None and _is_ours(traceback.tb_frame.f_code.co_filename):
            traceback = traceback.tb_next
        show(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = excepthook


def _is_ours(filename: str) -> bool:
    folder, name = os.path.split(filename)
    console_script = ("gemma4-compat", "gemma4-compat.exe")
    return (
        os.path.normpath(folder) in _OURS
        or name in ("runpy.py", *console_script)
        or filename.startswith(("<frozen runpy", "<frozen importlib"))
    )
