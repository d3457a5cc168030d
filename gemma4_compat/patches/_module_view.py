"""A stand-in for a module, with some attributes replaced."""

from __future__ import annotations

from typing import Any


class View:
    """Has these attributes; reads every other attribute from ``module``, and sets it there.

    Pass it where a forward expects the module, also as ``self``.  The module itself does not
    change, so other threads can run its forward at the same time.
    """

    def __init__(self, module: Any, **attributes: Any) -> None:
        own = vars(self)
        own["_module"] = module
        own.update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # torch.compile makes the object before its attributes
            raise AttributeError(name)
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)
