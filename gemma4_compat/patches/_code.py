"""What compiled code mentions; there is no source in some installations."""

from __future__ import annotations

from types import CodeType


def mentions(code: CodeType, text: str) -> bool:
    """Whether a name or a string in this code, or in a function in it, contains ``text``."""
    strings = (each for each in code.co_consts if isinstance(each, str))
    names = (*code.co_names, *code.co_varnames, *code.co_freevars, *strings)
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return any(text in name for name in names) or any(mentions(each, text) for each in inner)
