"""For forwards that take a layer's computing dtype from its weight.

A weight that bitsandbytes has quantised is uint8 or int8: storage, not the dtype that the layer
computes with.
"""

from __future__ import annotations

from typing import Any


def is_float(layer: Any) -> bool:
    """Whether the layer's weight is of a floating-point dtype, that is, not quantised."""
    return bool(layer.weight.dtype.is_floating_point)


class _Weight:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype


class _Layer:
    """A layer that computes as ever and claims another dtype for its weight."""

    def __init__(self, layer: Any, dtype: Any) -> None:
        self.layer = layer
        self.weight = _Weight(dtype)

    @property
    def linear(self) -> _Layer:
        """Inside a ``Gemma4ClippableLinear`` the weight is its linear layer's."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


class Claiming:
    """``module`` as its own forward is to see it: one child claims ``dtype`` for its weight.

    Passed as ``self``, so that nothing is changed on the module: other threads may be in its
    forward as well.
    """

    def __init__(self, module: Any, child: str, dtype: Any) -> None:
        self._module = module
        setattr(self, child, _Layer(getattr(module, child), dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
