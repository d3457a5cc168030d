"""Reads names and strings from compiled code, because some installations have no source."""

from __future__ import annotations

from types import CodeType


def mentions(code: CodeType, text: str) -> bool:
    """Whether a name or a string in ``code``, or in a function inside it, contains ``text``."""
    strings = (const for const in code.co_consts if isinstance(const, str))
    names = (*code.co_names, *code.co_varnames, *code.co_freevars, *strings)
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return any(text in name for name in names) or any(
        mentions(function, text) for function in inner
    )


def loads(code: CodeType, variable: str) -> bool:
    """Whether ``code``, or a function inside it, reads a variable of this name."""
    import dis

    for instruction in dis.get_instructions(code):
        argument = instruction.argval
        # Some instructions load two variables at once.
        names = argument if isinstance(argument, tuple) else (argument,)
        if instruction.opname.startswith("LOAD") and variable in names:
            return True
    return any(loads(const, variable) for const in code.co_consts if isinstance(const, CodeType))
