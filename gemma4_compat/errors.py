"""The errors that this package raises.

All of them can be imported from ``gemma4_compat``::

    try:
        plan("gemma-4-E2B-it", gpu="4GiB")
    except gemma4_compat.InputError as error:
        print(error)

``docs/how-it-works.md`` lists those that reach a user's call of another library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .engine.errors import PatchError as PatchError
from .engine.errors import suggestion as suggestion


class InputError(ValueError):
    """A file or an argument is invalid.  The message is one line that names it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class MergeError(RuntimeError):
    """Merging an adapter failed, and nothing was written.

    ``result`` is the ``MergeResult`` with the comparison of the two models.  It is ``None`` if
    merging failed before the comparison.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class ModelError(RuntimeError):
    """The state of a model, or its inputs, would make this result wrong."""


class RefusedError(ValueError):
    """This call would lose or damage something without an error."""


class DeadlockError(RuntimeError):
    """Threads that run one model with offloaded modules seem to wait for each other for ever."""


def reason(error: BaseException) -> str:
    """The type and the first line of another library's error; the next one, too, after a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def failures_of(step: str, kind: type[Exception] = InputError) -> Iterator[None]:
    """A block whose exceptions become an error of this kind, with a message of one line."""
    try:
        yield
    except (InputError, MergeError):
        raise
    except Exception as error:  # each library raises its own errors
        raise kind(f"{step}: {reason(error)}") from error
