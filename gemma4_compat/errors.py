"""The errors that this package raises.

All are importable from ``gemma4_compat`` itself::

    try:
        plan("gemma-4-E2B-it", gpu="4GiB")
    except gemma4_compat.InputError as error:
        print(error)
"""

from __future__ import annotations

from typing import Any


class InputError(ValueError):
    """A file or an argument cannot work.  The message is one line that names it."""


class MergeError(RuntimeError):
    """Merging an adapter failed, and nothing was written.

    ``result`` is the ``MergeResult`` with the comparison of the two models, if it was made.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class PatchError(RuntimeError):
    """Raised in place of a warning where the strict switch is on."""
