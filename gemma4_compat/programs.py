"""Finds the program that ``gemma4-compat run NAME`` means, and the Python that runs it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import InputError

_PYTHON_FILES = (".py", ".pyw", ".pyc")
#: The options of Python with which it does not import the sitecustomize of PYTHONPATH.
_WITHOUT_SITECUSTOMIZE = "EIS"
#: The options of Python that take a value.
_WITH_VALUE = "WX"


@dataclass(frozen=True)
class Program:
    """A file, and whether ``python PATH`` runs it or the operating system."""

    path: str
    is_python: bool
    #: the option with which its Python does not import sitecustomize, such as "-I"
    option: str = ""


def find(name: str, arguments: list[str]) -> Program:
    """The file of that name, or else the program of that name on PATH or beside this Python.

    Raises:
        InputError: there is no such program, there are two, or another Python runs it.
    """
    is_file = os.path.exists(name) and not _is_mere_folder(name)
    path = name if is_file else _program(name)
    command = _command(path)
    if not command:
        return Program(path, is_python=is_file or _is_python_without_command(path))
    is_script = command[0] != os.path.abspath(path)
    if not _is_python(command[0]):
        return Program(path, is_python=False)
    if is_file and is_script:
        return Program(path, is_python=True)
    if not _is_this_python(command[0]):
        python = f"{path} runs with {command[0]}, which" if is_script else path
        raise InputError(
            f"{python} is another Python than that of gemma4-compat, {sys.executable}: "
            "install gemma4-compat there, and use that one"
        )
    options = command[1:] if is_script else arguments
    return Program(path, is_script and not options, without_sitecustomize(options))


def without_sitecustomize(arguments: Iterable[str]) -> str:
    """The first of Python's own arguments with which it does not import our sitecustomize."""
    arguments = iter(arguments)
    for argument in arguments:
        if not re.fullmatch("-[^-].*", argument):
            break
        for index, letter in enumerate(argument[1:], start=2):
            if letter in _WITHOUT_SITECUSTOMIZE:
                return f"-{letter}"
            if letter in _WITH_VALUE:
                if not argument[index:]:
                    next(arguments, None)
                break
            if letter in "cm":
                return ""
    return ""


def _is_mere_folder(name: str) -> bool:
    """Whether it is a folder that Python cannot run, such as a clone with a program's name."""
    return os.path.isdir(name) and not any(
        os.path.exists(os.path.join(name, f"__main__.{suffix}")) for suffix in ("py", "pyc")
    )


def _program(name: str) -> str:
    """The program of that name on PATH or beside this Python."""
    folders = _folders_of_this_python()
    first = own = None
    if not os.path.dirname(name):
        first, own = shutil.which(name), shutil.which(name, path=os.pathsep.join(folders))
    if first and own and not os.path.samefile(first, own):
        if _runs_with_this_python(own) and not _runs_with_this_python(first):
            raise InputError(
                f"two programs are called {name}: {first}, the first on PATH, and {own}, "
                "which belongs to this Python; give the path of one"
            )
    if program := first or own:
        return program
    if os.path.isdir(name):  # Python says what the folder lacks
        return name
    if os.path.dirname(name):
        raise InputError(f"no such file: {name}")
    raise InputError(
        f"{name} is neither a file in this folder nor a program on PATH or in {', '.join(folders)}"
    )


def _runs_with_this_python(path: str) -> bool:
    command = _command(path)
    return bool(command) and _is_this_python(command[0])


def _folders_of_this_python() -> list[str]:
    """The folders into which pip installs programs."""
    user = sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts"), user]
    return list(dict.fromkeys(folders))


def _is_python_without_command(path: str) -> bool:
    if os.path.isdir(path) or path.endswith(_PYTHON_FILES):
        return True
    # On Windows, of an installer that does not write the line "#!".
    return zipfile.is_zipfile(path) and os.path.dirname(path) in _folders_of_this_python()


def _command(path: str) -> list[str]:
    """The command that the operating system runs for a file; empty if ``python PATH`` runs it.

    That of a program in machine code is its own path.
    """
    # A folder; or a pipe, which can be read only once.
    if not os.path.isfile(path) or path.endswith(_PYTHON_FILES):
        return []
    if zipfile.is_zipfile(path):
        return _first_line(_before_the_zip(path))
    with open(path, "rb") as file:
        head = file.read(1024)
    if head.startswith(b"#!"):
        return _first_line(head)
    return [os.path.abspath(path)] if b"\0" in head else []


def _before_the_zip(path: str) -> bytes:
    """The last "#!" line before the files of a zip: the programs of pip on Windows have one."""
    with zipfile.ZipFile(path) as archive:
        start = min((each.header_offset for each in archive.infolist()), default=0)
    with open(path, "rb") as file:
        before = file.read(start)
    return before[before.rfind(b"#!") :] if b"#!" in before else b""


def _first_line(head: bytes) -> list[str]:
    """The command of a script's "#!" line."""
    lines = head.decode(errors="replace").splitlines()[:2]
    if not lines:
        return []
    try:
        words = shlex.split(lines[0][2:].strip(), posix=os.name != "nt")
        # Installers write this where the path of Python is long or has a space.
        if words == ["/bin/sh"] and lines[1:] and lines[1].startswith("'''exec'"):
            words = shlex.split(lines[1])[1:2]
    except ValueError:  # an unbalanced quotation mark
        return lines[0][2:].split()
    words = [word.strip('"') for word in words]
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if word != "-S"]
        words[:1] = [shutil.which(word) or word for word in words[:1]]
    return words


def _is_python(executable: str) -> bool:
    name = re.split(r"[/\\]", executable)[-1].lower()
    return re.fullmatch(r"(python|pypy)w?[\d.]*w?(t|d)?(\.exe)?", name) is not None


def _is_this_python(executable: str) -> bool:
    return _is_python(executable) and _identity(executable) == _identity(sys.executable)


def _identity(executable: str) -> str:
    """The folder of its virtual environment, or else the file: environments share that."""
    folder = os.path.dirname(os.path.abspath(executable))
    for home in (folder, os.path.dirname(folder)):
        if os.path.isfile(os.path.join(home, "pyvenv.cfg")):
            return os.path.realpath(home)
    return os.path.realpath(executable)
