"""What ``gemma4_compat.status()`` returns: the engine's states as text."""

from __future__ import annotations

from collections.abc import Iterator

from ..engine.status import Status as EngineStatus
from .result import Result


class Status(EngineStatus, Result):
    """The states of all patches, to iterate over, to index by name or number, and to print.

    Example::

        status = gemma4_compat.status()
        print(status)
        print(status.ok, status["clippable_linear"].state)
    """

    def __str__(self) -> str:
        return "\n\n".join(self._paragraphs())

    def _paragraphs(self) -> Iterator[str]:
        from .text import table, wrap

        yield "\n".join(filter(None, (self.about.title, wrap(self.verdict))))
        if self.libraries:
            yield table([(name, v or "not installed") for name, v in self.libraries.items()])
        yield from map(wrap, (*self.advice, *self.notes))
        if hint := self.about.hints[self.every]:
            yield wrap(hint)
        if shown := self.shown:
            yield table([(each.name, each.state, each.reason) for each in shown])
