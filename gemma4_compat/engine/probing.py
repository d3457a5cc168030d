"""Reads names and strings from compiled code, because some installations have no source."""

from __future__ import annotations

import inspect
from importlib import import_module
from operator import attrgetter
from types import CodeType
from typing import Any


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
