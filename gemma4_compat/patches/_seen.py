"""A module as the forward of the one around it is to see it."""

from __future__ import annotations

from typing import Any


class Seen:
    """``module``, with some attributes replaced.

    Passed in place of the module, as ``self`` too, so that nothing is changed on the module: other
    threads may be in its forward as well.
    """

    def __init__(self, module: Any, **attributes: Any) -> None:
        self._module = module
        for name, value in attributes.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)
