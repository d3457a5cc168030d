"""Watching for the import of modules."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import wrapt


class Imports:
    """Calls ``imported`` after the import of each watched module, inside that import."""

    def __init__(self, imported: Callable[[], None]) -> None:
        self._imported = imported
        self._watched: set[str] = set()
        self._complete: dict[str, Any] = {}

    def watches(self, name: str) -> bool:
        return name in self._watched

    def watch(self, name: str) -> None:
        if name in self._watched:
            return
        self._watched.add(name)
        registering: int | None = threading.get_ident()

        def imported(module: object) -> None:
            # wrapt calls at once, from within the registration, where the module is in
            # sys.modules: perhaps in the middle of its import, with half its names.
            if registering != threading.get_ident():
                self._complete[name] = sys.modules.get(name)
            self._imported()

        wrapt.register_post_import_hook(imported, name)
        registering = None
        if sys.modules.get(name) is not None and not self.is_imported(name):
            # Another thread is importing it: wait for that.  (In the middle of our own thread's
            # import this returns at once, and what waits for it waits for the next occasion.)
            with suppress(Exception):
                importlib.import_module(name)
            self._imported()

    def is_imported(self, name: str) -> bool:
        """Imported to the end; inside a post-import hook, the import system says "not yet"."""
        module = sys.modules.get(name)
        if module is None:
            return False
        initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
        return not initializing or self._complete.get(name) is module
