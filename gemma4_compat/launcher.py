"""``gemma4-compat run``: starts a program whose Python processes import this package.

They do so through ``_sitecustomize/sitecustomize.py``, whose folder is put first in ``PYTHONPATH``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

_HERE = os.path.dirname(__file__)
_FAST = "GEMMA4_COMPAT_FAST"
_PYTHON_FILES = (".py", ".pyw", ".pyc")


def run(program: list[str], *, as_module: bool, fast: bool = False) -> int:
    """Replace this process by the program; on Windows, wait for it and return its exit code.

    ``fast`` asks for the patches of that kind.
    """
    command = [sys.executable, "-m", *program] if as_module else _command(*program)
    if not command:
        hint = ": pip install trl" if program[0] == "trl" else ""
        _say(f"{program[0]} is neither a file nor a program on PATH{hint}")
        return 2
    if fast:
        value = os.environ.get(_FAST, "")
        if value not in ("", "1"):
            _say(f"{_FAST}={value} contradicts --fast: unset the variable, or omit the option")
            return 2
        os.environ[_FAST] = "1"
    if not _patch_children():
        return 2
    try:
        if os.name == "nt":
            return _run_and_wait(command)
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and a program inherits that
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        sys.stdout.flush()
        os.execv(command[0], command)
    except OSError as error:
        _say(f"cannot run {command[0]}: {error.strerror}")
        return 2


def _command(name: str, *arguments: str) -> list[str]:
    """What to execute: Python with a file, or a program beside this Python or on PATH."""
    is_package = os.path.isfile(os.path.join(name, "__main__.py"))
    is_text = os.path.isfile(name) and not os.access(name, os.X_OK)
    if is_package or is_text or name.endswith(_PYTHON_FILES):
        return [sys.executable, name, *arguments]
    folders = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    program = shutil.which(name, path=os.pathsep.join(folders))
    return [program, *arguments] if program else []


def _say(message: str) -> None:
    print(f"gemma4-compat run: {message}", file=sys.stderr, flush=True)


def _patch_children() -> bool:
    """Make the program's Python processes import this package; whether that is possible."""
    package = os.path.abspath(_HERE)
    folder, root = os.path.join(package, "_sitecustomize"), os.path.dirname(package)
    if os.pathsep in package:
        _say(
            f"cannot patch the program: PYTHONPATH cannot name {root}, as that has a "
            f"{os.pathsep!r}.  Install gemma4_compat into another folder"
        )
        return False
    path = os.environ.get("PYTHONPATH")
    entries = [entry for entry in path.split(os.pathsep) if entry != folder] if path else []
    # A clone that is not installed.
    if os.path.basename(root) not in ("site-packages", "dist-packages") and root not in entries:
        entries.append(root)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *entries])
    return True


def _run_and_wait(command: list[str]) -> int:
    """Run a program on Windows, which cannot replace a process by another."""
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the program gets it, too
                continue
