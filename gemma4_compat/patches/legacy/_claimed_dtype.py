"""A compute dtype for upstream forwards that read ``layer.weight.dtype``.

The weight of a layer that bitsandbytes quantized has a storage dtype, uint8 or int8, which is not
the dtype that the layer computes with.
"""

from __future__ import annotations

from typing import Any

from ...objects import View


class _Weight:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype


def claiming(module: Any, layer: str, dtype: Any) -> Any:
    """A stand-in for ``module`` in which ``layer.weight.dtype`` is ``dtype``.

    Pass it as ``self`` to the module's forward.  ``layer`` is a dotted name in ``module``; the
    layer itself computes as before.  If its weight is not quantized, this is ``module`` itself.
    """
    if module.get_submodule(layer).weight.dtype.is_floating_point:
        return module
    child, _, rest = layer.partition(".")
    inner = getattr(module, child)
    view = claiming(inner, rest, dtype) if rest else View(inner, weight=_Weight(dtype))
    return View(module, **{child: view})
