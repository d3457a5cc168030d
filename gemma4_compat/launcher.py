"""``gemma4-compat run``: runs a program in this process, as Python itself would run it."""

from __future__ import annotations

import builtins
import functools
import os
import runpy
import sys
import types
import zipfile
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from typing import Any

_HERE = os.path.dirname(__file__)
_OURS = (_HERE, os.path.join(_HERE, "cli"))


def run(program: list[str], *, as_module: bool) -> int:
    """Do what ``python PROGRAM`` or ``python -m PROGRAM`` does, in this process."""
    if not as_module and not os.path.exists(program[0]):
        print(f"gemma4-compat: no such file: {program[0]}", file=sys.stderr)
        return 2
    # Not runpy's public functions: they replace __main__ by a temporary module, and remove that
    # module before the program's threads and exit handlers have ended.
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins)
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # the alias for objects that children send back
        sys.modules["__mp_main__"] = module
    _patch_children()
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
    return 0


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


def _patch_children() -> None:
    """Make processes that multiprocessing spawns import this package before the program.

    A child first unpickles a dict of preparation data, then runs the program's file as
    ``__mp_main__``.  This adds an entry to the dict that nobody reads: unpickling it imports the
    package in the child, and patches multiprocessing in the child for its own children.
    """
    from multiprocessing import spawn

    original = spawn.get_preparation_data
    if isinstance(vars(original).get("added"), _ImportedByPickle):
        return

    @functools.wraps(original)
    def get_preparation_data(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**original(*args, **kwargs), __package__: _ImportedByPickle()}

    vars(get_preparation_data)["added"] = _ImportedByPickle()
    spawn.get_preparation_data = get_preparation_data


class _ImportedByPickle:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        # The child's sys.path is replaced by the parent's only after unpickling.
        folder = str(Path(__file__).parents[1])
        child = f"from {__name__} import _patch_children; _patch_children()"
        return exec, (f"import sys; sys.path.append({folder!r}); {child}",)
