"""What the functions and commands of this package return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any


class Result(ABC):
    """A result to print, to read in a program, or to show in a notebook.

    ``str(result)`` is text for a terminal.  A command prints it and exits with ``exit_code``.  The
    verdict is green if ``ok`` is true, yellow if only the exit code is 0, else red.  IPython shows
    the same text, and a notebook its tables as tables.
    """

    @property
    @abstractmethod
    def ok(self) -> bool:
        """Whether the inspected thing works."""

    @property
    def exit_code(self) -> int:
        """That of the command that prints this result."""
        return 0 if self.ok else 1

    @property
    def verdict(self) -> str:
        """The part of ``str(self)`` that says whether it works; a terminal shows it in color."""
        return ""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""

    def _lines(self) -> Iterable[str]:
        """The lines of ``str(self)``."""
        return ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):  # else dataclass would write all fields
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.verdict or str(self).partition(chr(10))[0]}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        from .html import page

        return page(self)
