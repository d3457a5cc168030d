"""What compiled code mentions; there is no source in some installations."""

from __future__ import annotations

from types import CodeType


def mentions(code: CodeType, text: str) -> bool:
    """Whether a name or a string in this code, or in a function in it, contains ``text``."""
    strings = (each for each in code.co_consts if isinstance(each, str))
    names = (*code.co_names, *code.co_varnames, *code.co_freevars, *strings)
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return any(text in name for name in names) or any(mentions(each, text) for each in inner)


def loads(code: CodeType, variable: str) -> bool:
    """Whether this code, or a function in it, reads a variable of that name."""
    import dis

    for each in dis.get_instructions(code):
        # Some instructions load two variables at once.
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if each.opname.startswith("LOAD") and variable in names:
            return True
    return any(loads(each, variable) for each in code.co_consts if isinstance(each, CodeType))
