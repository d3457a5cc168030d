"""Watches which Python functions a step runs: a graph repeats kernels, and runs no Python code.

A function of a known library computes the same kernels in each step, as long as the model and the
functions that it calls by name are the same.  Any other function may count, decay or record, so it
has to run in each step.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

#: The libraries whose functions a graph may stand for.
KNOWN = (
    "torch", "transformers", "accelerate", "peft", "bitsandbytes", "gemma4_compat",
    "compressed_tensors", "typing_extensions",
)  # fmt: skip
#: In Python's folder: what counts calls, and what is not Python's own.
_NOT_KNOWN = ("unittest", "site-packages", "dist-packages")
#: Modules of Python whose calls do nothing that a step needs in each token, whatever they call.
_ASIDE = ("logging", "warnings", "importlib._bootstrap")
_METHODS = MethodType, classmethod, staticmethod
#: A name in a namespace, with its value there: namespace, name, value, label.
Use = tuple[Mapping[str, Any], str, Any, str]


class Watch:
    """The Python functions that a thread ran."""

    def __init__(self) -> None:
        self.functions: dict[int, tuple[CodeType, dict[str, Any]]] = {}  # by the id of the code
        self.is_complete = self.is_wrong = False

    def unknown(self) -> str | None:
        """The reason why a graph cannot stand for these functions; ``None`` if it can."""
        if not self.is_complete:
            return "a profiler is at work (sys.setprofile), so it is not known what a step runs"
        for code, namespace in self.functions.values():
            if not is_known(code, namespace):
                name = getattr(code, "co_qualname", code.co_name)
                where = f"{code.co_filename}, line {code.co_firstlineno}"
                return f"a graph does not run Python code, and a step runs {name} ({where})"
        return None


@contextmanager
def watched(is_wrong: Callable[[FrameType], bool] | None = None) -> Iterator[Watch]:
    """In this context, note the Python functions that this thread runs, and wrong calls."""
    watch = Watch()
    functions, outside = watch.functions, _calls_aside(sys._getframe())

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            if id(code) not in functions and _calls_aside(frame) == outside:
                functions[id(code)] = code, frame.f_globals
            if is_wrong is not None and is_wrong(frame):
                watch.is_wrong = True

    if sys.getprofile() is not None:
        yield watch
        return
    sys.setprofile(note)
    try:
        yield watch
    finally:
        watch.is_complete = sys.getprofile() is note
        if watch.is_complete:
            sys.setprofile(None)


def is_upstreams(function: Any) -> bool:
    """Whether a function, and each that it wraps (``functools.wraps``), is of a known library."""
    return all(
        type(each) is FunctionType and is_known(each.__code__, each.__globals__)
        for each in wrapped_by(function)
    )


def wrapped_by(function: Any) -> Iterator[Any]:
    """A function, and each that it wraps (``functools.wraps``); of a method, its function.

    It ends with an object that is no function, which may have any attribute.
    """
    while function is not None:
        if type(function) in _METHODS:
            function = function.__func__
        yield function
        function = vars(function).get("__wrapped__") if type(function) is FunctionType else None


def is_of_user(error: Exception) -> bool:
    """Whether an error comes from other code than that of a step, such as a signal's handler.

    The error of a handler that limits the time, or one that another thread sends
    (``PyThreadState_SetAsyncExc``), has to reach the user: a step must not run again after it.
    An error of another thread has no arguments.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    # those of libraries may have none
    bare = AssertionError, MemoryError, NotImplementedError, StopIteration
    if not (error.args or isinstance(error, bare)):
        return True
    if {frame.f_code for frame in frames} & _handlers():
        return True
    library = type(error).__module__.partition(".")[0]
    if library in sys.stdlib_module_names and frames:  # such as ValueError, which any code raises
        return not is_known(frames[-1].f_code, frames[-1].f_globals)
    return library not in (*KNOWN, "safetensors_rust", "triton")


def _handlers() -> set[CodeType]:
    """The code of the functions that handle signals: they run between any two lines."""
    functions = map(signal.getsignal, signal.valid_signals())
    called = (getattr(each, "func", each) for each in functions if callable(each))
    methods = (each if hasattr(each, "__code__") else type(each).__call__ for each in called)
    codes = (getattr(each, "__code__", None) for each in methods)
    return {code for code in codes if code is not None}


def _calls_aside(frame: FrameType | None) -> int:
    """How many functions of these modules have called this one; ``generate`` may run in them."""
    count = 0
    while frame is not None:
        count += frame.f_globals.get("__name__") in _ASIDE
        frame = frame.f_back
    return count


def uses_of(functions: Iterable[tuple[CodeType, dict[str, Any]]]) -> dict[tuple[int, str], Use]:
    """These functions, and what they call by name; by the id of its owner, and its name.

    A kernel stands for the function that it replaces, and for what that one calls.
    """
    import torch

    uses: dict[tuple[int, str], Use] = {}
    functions = list(functions)
    codes = {code for code, _ in functions}
    for code, namespace in functions:  # the list grows meanwhile
        before = len(uses)
        label = str(namespace.get("__name__"))
        pairs = [(each, (code.co_name,)) for each in _classes_in(namespace)]
        for owner, names in [*pairs, (namespace, code.co_names), (torch.Tensor, code.co_names)]:
            uses |= _uses(owner, names, label, [])
        for _, _, value, _ in list(uses.values())[before:]:
            replaced = getattr(value, "__wrapped__", None) if type(value) is FunctionType else None
            if type(replaced) is FunctionType and replaced.__code__ not in codes:
                codes.add(replaced.__code__)
                functions.append((replaced.__code__, replaced.__globals__))
    return uses


def _uses(owner: Any, names: tuple[str, ...], label: str, seen: list[Any]) -> dict[Any, Use]:
    """What these names stand for in a namespace, and in the modules and classes named there."""
    seen.append(owner)
    entries = owner if isinstance(owner, dict) else vars(owner)
    uses: dict[tuple[int, str], Use] = {}
    for name in names:
        value = entries.get(name)
        # A method that a user adds hides one of a base class.
        if _can_be_called(value) or (value is None and _inherits(owner, name)):
            uses[id(owner), name] = entries, name, value, label
        if isinstance(value, (ModuleType, type)) and all(value is not each for each in seen):
            uses |= _uses(value, names, value.__name__, seen)
        for table in _tables_of(value):
            for key, function in table.items():
                uses[id(table), key] = table, key, function, name
    return uses


def _tables_of(value: Any) -> tuple[dict[str, Any], ...]:
    """The functions in one of transformers' tables, such as ``ALL_ATTENTION_FUNCTIONS``."""
    own = vars(value).get("_local_mapping") if hasattr(value, "__dict__") else None
    return () if own is None else (own, type(value)._global_mapping)


def _classes_in(namespace: dict[str, Any]) -> list[type]:
    """The classes that a Python module defines; a method is found by its name in one of them."""
    name, values = namespace.get("__name__"), list(namespace.values())
    return [each for each in values if issubclass(type(each), type) and each.__module__ == name]


def _inherits(owner: Any, name: str) -> bool:
    return isinstance(owner, type) and any(name in vars(base) for base in owner.__mro__[1:-1])


def _can_be_called(value: Any) -> bool:
    return callable(value) or isinstance(value, (classmethod, property, ModuleType))


def is_known(code: CodeType, namespace: dict[str, Any]) -> bool:
    """Whether a function is of a known library, or of Python."""
    file, name = code.co_filename, code.co_name
    if file.startswith("<"):  # no file: of Python itself, or written by it for a class
        library = str(namespace.get("__name__")).partition(".")[0]
        is_written = name.startswith("__") and name.endswith("__")
        is_namedtuple = namespace.keys() == {"_tuple_new", "__builtins__", "__name__"}
        return file.startswith("<frozen ") or is_namedtuple or (is_written and library in KNOWN)
    libraries = (sys.modules[name] for name in KNOWN if name in sys.modules)
    if file.startswith(tuple(map(_folder_of, libraries))):
        return True
    python = _folder_of(os)
    return file.startswith(python) and not file.removeprefix(python).startswith(_NOT_KNOWN)


def _folder_of(module: ModuleType) -> str:
    folder, file = os.path.split(str(module.__file__))
    is_package = hasattr(module, "__path__") or module is os
    return os.path.join(folder, "" if is_package else file)
