"""Reads names and strings from compiled code, because some installations have no source."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module, util
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ..engine import Finding
from ..engine.patch import Verdict


def code_of(function: Any) -> CodeType:
    """The code of a Python function, without its decorators.

    Raises:
        AttributeError: it is no Python function; a probe that raises it says ``drifted``.
    """
    code: CodeType = inspect.unwrap(function).__code__
    return code


def code_at(module: str, attribute: str) -> CodeType:
    """The code of a function in a library, such as ``Class.method``; raises as ``code_of``."""
    return code_of(attrgetter(attribute)(import_module(module)))


def mentions(code: CodeType, text: str) -> bool:
    """Whether a name or a string in ``code``, or in a function inside it, contains ``text``."""
    strings = (const for const in code.co_consts if isinstance(const, str))
    names = (*code.co_names, *code.co_varnames, *code.co_freevars, *strings)
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return any(text in name for name in names) or any(
        mentions(function, text) for function in inner
    )


def checking_names(patch: str, probe: Callable[[], Finding]) -> Callable[[], Finding]:
    """The probe, which also looks for the names that the patch reads later, without a guard.

    It raises ``AttributeError`` if a name is missing, so that the patch drifts.  The names are in
    ``names.json``, which ``tools/private_names.py`` writes.
    """

    @wraps(probe)
    def look() -> Finding:
        finding = probe()
        for name in _names().get(patch, ()) if finding.verdict is Verdict.BROKEN else ():
            _look_up(name)
        return finding

    return look


@cache
def _names() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(Path(__file__).with_name("names.json").read_text())
    return found


def _look_up(name: str) -> None:
    """Raise ``AttributeError`` if a name is missing in what is imported so far."""
    path, *parts = name.split(".")
    owner: Any = sys.modules.get(path)
    for part in parts if owner else ():
        path = f"{path}.{part}"
        if isinstance(owner, ModuleType) and part not in vars(owner):
            if path in sys.modules:
                owner = sys.modules[path]
                continue
            is_begun = getattr(owner.__spec__, "_initializing", False)
            if is_begun or (hasattr(owner, "__path__") and util.find_spec(path)):
                return  # it is not imported yet
        if isinstance(owner, FunctionType):  # which sets an attribute of that name
            if not is_named(code_of(owner), part):
                raise AttributeError(f"{owner.__qualname__} sets no {part}")
            return
        owner = getattr(owner() if path.startswith("torch.nn.Module.") else owner, part)


def is_named(code: CodeType, name: str) -> bool:
    """Whether this is a name or a string in ``code``, or in a function inside it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return name in (*code.co_names, *code.co_consts) or any(is_named(c, name) for c in inner)
