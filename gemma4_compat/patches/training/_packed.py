"""Tells 4-bit weights from others."""

from __future__ import annotations

from typing import Any


def is_4bit(parameter: Any) -> bool:
    """Whether this is a quantized ``Params4bit``."""
    return getattr(parameter, "quant_state", None) is not None
