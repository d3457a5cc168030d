"""One bug, one file.  A module here that builds a ``PATCH`` is a patch; nothing is registered."""

from __future__ import annotations

import importlib
import pkgutil

from ..engine import Patch


def load() -> list[Patch]:
    """Import every patch module, in order of name, and return their patches."""
    names = sorted(
        info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")
    )
    return [importlib.import_module(f"{__name__}.{name}").PATCH for name in names]
