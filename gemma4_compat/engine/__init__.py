"""A small, general engine for version-gated, reversible runtime patches.

It knows nothing of Gemma. A patch is a module that builds one :class:`Patch`. This package exports
everything that a patch may use of the engine, and what a shim of its own needs, see
``docs/write-a-shim.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .patch import Finding, Kind, Part, Patch, Replacement, broken, drifted, fixed, fixed_if

if TYPE_CHECKING:
    from .core import Engine
    from .status import State, Status
    from .switches import Switches, read

__all__ = [
    "Engine",
    "Finding",
    "Kind",
    "Part",
    "Patch",
    "Replacement",
    "State",
    "Status",
    "Switches",
    "broken",
    "drifted",
    "fixed",
    "fixed_if",
    "read",
]

#: what is imported when it is needed first, and its module
_LAZY = {
    "Engine": "core",
    "State": "status",
    "Status": "status",
    "Switches": "switches",
    "read": "switches",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
