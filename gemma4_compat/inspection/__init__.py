"""Inspect adapters, target modules, device maps and loaded models, without reading weights.

This module loads none of the libraries when it is imported; each function imports what it needs.
"""

from .adapter import inspect_adapter
from .device_map import check_device_map
from .model import inspect_model
from .targets import scan_targets

__all__ = ["check_device_map", "inspect_adapter", "inspect_model", "scan_targets"]
