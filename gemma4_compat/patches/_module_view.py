"""A stand-in for a module, with some attributes replaced."""

from __future__ import annotations

from typing import Any


class View:
    """Has these attributes; reads every other attribute from ``module``.

    Pass it where a forward expects the module, also as ``self``.  The module itself does not
    change, so other threads can run its forward at the same time.
    """

    def __init__(self, module: Any, **attributes: Any) -> None:
        self._module = module
        for name, value in attributes.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # torch.compile makes the object before its attributes
            raise AttributeError(name)
        return getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)
