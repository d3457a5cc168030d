"""The base of every command: arguments, libraries, errors, output and exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import logging
import os
import re
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..engine.gate import evaluate, too_old, upgrade
from ..errors import InputError, MergeError, PatchError
from ..results.result import Result
from ..results.text import words
from ..versions import FLOORS, OLDEST_TORCH, WITH_TORCH

#: what a command needs that imports PEFT
PEFT = ("torch", "transformers", "accelerate", "peft")


@dataclass(frozen=True)
class Command:
    """One command.

    The first line of ``description`` is shown in the list of commands.  ``arguments`` adds its
    arguments to a parser.  ``run`` returns the result to print; a command without it overrides
    `execute`.  ``needs`` holds the libraries that it imports, or returns them for its options.
    ``stopped`` is added to the message after Ctrl-C.
    """

    name: str
    description: str | None
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Result] | None = None
    needs: Sequence[str] | Callable[[argparse.Namespace], Sequence[str]] = ()
    usage: str | None = None
    stopped: str = ""

    def add_to(self, commands: argparse._SubParsersAction[Any]) -> None:
        parser = commands.add_parser(
            self.name,
            help=(self.description or "").partition("\n")[0],
            description=self.description,
            usage=self.usage,
            formatter_class=Help,
        )
        self.arguments(parser)
        if self.run is not None:
            parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(execute=self.execute)

    def execute(self, options: argparse.Namespace) -> int:
        """Run the command and print what it returns; returns the exit code."""
        try:
            needs = self.needs(options) if callable(self.needs) else self.needs
            _check_versions(needs)
            assert self.run is not None
            with _says_what_it_does(self.name, needs), _quiet_libraries():
                try:
                    result = self.run(options)
                except Exception as error:
                    if not isinstance(error, InputError) and not _is_interrupted(error):
                        _check_imports()
                    raise
        except (InputError, KeyboardInterrupt) as error:
            if _is_interrupted(error):
                return self._fails(f"interrupted{self.stopped}", 130)
            return self._fails(str(error), 2)
        except PatchError as error:  # the strict switch is on
            return self._fails(str(error), 1)
        except MergeError as error:
            if error.result is not None:
                _print(error.result, options)
            return self._fails(f"{error}; nothing was written", 1)
        _print(result, options)
        return result.exit_code

    def _fails(self, message: str, code: int) -> int:
        print(f"gemma4-compat {self.name}: {message}", file=sys.stderr)
        return code


def _is_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused this error: transformers turns it into a failed import."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _check_versions(libraries: Sequence[str]) -> None:
    """Raise `InputError` if one of the libraries is missing or too old."""
    installed = evaluate(libraries).versions
    missing = [name for name in libraries if name not in installed]
    floors = {"torch": OLDEST_TORCH, **FLOORS}
    old = too_old({name: floors[name] for name in libraries if name in floors})
    what = [*old.values(), *([f"needs {', '.join(missing)}"] if missing else [])]
    if what:
        newer = upgrade({name: floors[name] for name in old}) if old else "pip install"
        raise InputError(f"{'; '.join(what)}: {' '.join([newer, *missing])}")


def _check_imports() -> None:
    """Raise `InputError` if an installed library cannot be imported."""
    for name in evaluate(WITH_TORCH).versions:
        try:
            importlib.import_module(name)
        except Exception as error:
            text = f"cannot import {name}: {type(error).__name__}: {error}"
            raise InputError(text) from error


@contextlib.contextmanager
def _says_what_it_does(name: str, libraries: Sequence[str]) -> Iterator[None]:
    """On a terminal, say after a moment why nothing is printed yet."""
    *most, last = libraries or WITH_TORCH
    text = f"gemma4-compat {name}: first imports {', '.join(most)} and {last} ..."
    timer = threading.Timer(0.2, lambda: print(text, file=sys.stderr))
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Hide the output and warnings of the libraries, but not our own log messages."""
    handler = logging.StreamHandler()
    handler.addFilter(logging.Filter(__package__.partition(".")[0]))
    root = logging.getLogger()
    root.addHandler(handler)
    # transformers reads its verbosity once, on import, and has a handler of its own.
    verbosity = os.environ.get("TRANSFORMERS_VERBOSITY")
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(handler)
        if verbosity is None:
            del os.environ["TRANSFORMERS_VERBOSITY"]
        else:
            os.environ["TRANSFORMERS_VERBOSITY"] = verbosity


class Help(argparse.HelpFormatter):
    """Wraps at the width of the terminal, and leaves indented lines as they are, and long words.

    A comment beside a command is printed below it if the line is too long.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        text = " ".join(text.split())
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for raw, block in itertools.groupby(text.splitlines(), lambda line: line[:1] in ("", " ")):
            if not raw:
                lines += self._split_lines(" ".join(block), width)
                continue
            for line in block:
                command, *comment = re.split(r"(?<=\S) {3,}", line)
                if len(line) <= width or not comment:
                    lines.append(line)
                else:
                    more = self._split_lines(comment[0], width - 6)
                    lines += [command, *(f"{'':6}{each}" for each in more)]
        return "\n".join(f"{indent}{line}" for line in lines)


class Parser(argparse.ArgumentParser):
    """A parser that prints an error in the arguments as one line."""

    def error(self, message: str) -> NoReturn:
        # Positional arguments are in capitals; their messages name the value.
        message = re.sub(r"^argument ([A-Z_]+: )?", "", message)
        if message.startswith("the following arguments"):
            message += f" ({self.prog} --help lists the arguments)"
        self.exit(2, f"{self.prog}: {message}\n")


def _print(result: Result, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(result.as_dict(), indent=2))
        return
    text = str(result)
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if result.verdict and sys.stdout.isatty() and not plain:
        color = 32 if result.ok else 31 if result.exit_code else 33
        text = re.sub(words(result.verdict), rf"\033[{color}m\g<0>\033[0m", text, count=1)
    print(text)
