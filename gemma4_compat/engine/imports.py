"""Watches for the import of modules."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import wrapt


class Imports:
    """Calls ``imported`` at the end of the import of each watched module."""

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
            # If the module is in sys.modules, wrapt calls this during the registration.  The
            # module may then be half imported, with some names missing.
            if registering != threading.get_ident():
                self._complete[name] = sys.modules.get(name)
            self._imported()

        wrapt.register_post_import_hook(imported, name)
        registering = None
        if sys.modules.get(name) is not None and not self.is_imported(name):
            # Another thread is importing it: wait for it.  (If our own thread is importing it, this
            # returns at once, and patches that wait for it are applied on a later occasion.)
            with suppress(Exception):
                importlib.import_module(name)
            self._imported()

    def is_imported(self, name: str) -> bool:
        """Whether its import is complete.  In post-import hooks, ``_initializing`` is still set."""
        module = sys.modules.get(name)
        if module is None:
            return False
        initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
        return not initializing or self._complete.get(name) is module
