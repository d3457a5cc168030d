"""Inspect adapters, target modules, device maps and loaded models, without reading weights.

This module loads none of the libraries when it is imported; each function imports what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import inspect_adapter
    from .device_map import check_device_map
    from .model import inspect_model
    from .targets import scan_targets

__all__ = ["check_device_map", "inspect_adapter", "inspect_model", "scan_targets"]

_MODULES = {
    "check_device_map": "device_map",
    "inspect_adapter": "adapter",
    "inspect_model": "model",
    "scan_targets": "targets",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
