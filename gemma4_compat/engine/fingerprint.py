"""A hash of a function's source, by which a patch knows code that it copies.

It is that of the tokens, without comments and docstrings, and is the same in each Python from 3.10.
"""

from __future__ import annotations

import inspect
import token
from hashlib import sha256
from tokenize import TokenError, generate_tokens
from typing import Any

from .patch import Copied
from .slots import resolve

_LEFT_OUT = (token.COMMENT, token.NL, token.ENDMARKER)
_BLOCKS = {token.INDENT: "\t", token.DEDENT: "\n"}
#: Since Python 3.12, strings with values inside have several tokens.
_STARTS, _ENDS = (
    [getattr(token, f"{kind}STRING_{end}", None) for kind in "FT"] for end in ("START", "END")
)


def is_measured(copied: Copied) -> bool:
    """Whether a function that a patch copies has the code of a measured release."""
    try:
        found = fingerprint(resolve(copied).function)
    except (AttributeError, OSError, SyntaxError, TokenError, TypeError):
        return False
    return found in copied.fingerprints.split()


def fingerprint(function: Any) -> str:
    """12 hexadecimal digits for the source of a function, with its decorators.

    Raises:
        AttributeError, OSError, SyntaxError, TokenError, TypeError: its source cannot be read.
    """
    return digest(inspect.getsourcelines(inspect.unwrap(function).__code__)[0])


def digest(lines: list[str]) -> str:
    """The same for lines of source."""
    found: list[str] = []
    statement: list[str] = []
    begun: list[tuple[int, int]] = []  # where strings begin that have values inside
    for kind, text, start, end, _ in generate_tokens(iter(lines).__next__):
        if kind in _STARTS:
            begun.append(start)
        elif kind in _ENDS:
            start, kind = begun.pop(), token.STRING
            text = _between(lines, start, end)
        if begun or kind in _LEFT_OUT:
            continue
        if kind == token.NEWLINE:
            if not all(map(_is_plain_string, statement)):  # a docstring
                found += [*statement, ";"]
            statement = []
        elif kind in _BLOCKS:
            found.append(_BLOCKS[kind])
        else:
            statement.append(text)
    return sha256("\0".join(found).encode()).hexdigest()[:12]


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The source from one place (row from 1, column) to another."""
    rows = lines[start[0] - 1 : end[0]]
    rows[-1] = rows[-1][: end[1]]
    return "".join([rows[0][start[1] :], *rows[1:]])


def _is_plain_string(text: str) -> bool:
    return text.lstrip("rRuUbB")[:1] in ("'", '"')
