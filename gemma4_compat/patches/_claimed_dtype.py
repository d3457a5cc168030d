"""For forwards that take a layer's computing dtype from its weight.

A weight that bitsandbytes has quantised is uint8 or int8: storage, not the dtype that the layer
computes with.
"""

from __future__ import annotations

from typing import Any

from ._module_view import View


def is_float(layer: Any) -> bool:
    """Whether the layer's weight is of a floating-point dtype, that is, not quantised."""
    return bool(layer.weight.dtype.is_floating_point)


class _Weight:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype


def claiming(module: Any, layer: str, dtype: Any) -> Any:
    """``module`` for its own forward, with ``layer`` in it claiming ``dtype`` for its weight.

    ``layer`` is a dotted name; the layer computes as ever.
    """
    child, _, rest = layer.partition(".")
    inner = getattr(module, child)
    seen = claiming(inner, rest, dtype) if rest else View(inner, weight=_Weight(dtype))
    return View(module, **{child: seen})
