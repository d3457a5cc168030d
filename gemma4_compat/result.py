"""What the functions and commands of this package return."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from typing import Any


class Result(ABC):
    """A result to print, to read in a program, or to show in a notebook.

    ``str(result)`` is text for a terminal.  A command prints it and exits with 0 if ``ok`` is true,
    else with 1.
    """

    @property
    @abstractmethod
    def ok(self) -> bool:
        """Whether the inspected thing works."""

    @property
    def verdict(self) -> str:
        """The part of ``str(self)`` that says whether it works; a terminal shows it in colour."""
        return ""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""

    @abstractmethod
    def __str__(self) -> str: ...

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
