"""Calls a function after each dispatch of a model with accelerate's hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ...engine import Patch
from ...engine.signatures import calling
from ...runtime.host.hooked import Way

#: Both call themselves for every module, with the module's name.
_ATTACH = ("attach_align_device_hook", "attach_align_device_hook_on_blocks")


def use(patch: Patch, way: Way) -> None:
    """Use a way to fetch weights in models that are dispatched while the patch is applied."""
    way.name = patch.name
    after_dispatch(patch, way.dispatched, begin=way.start)
    patch.on_revert(way.stop)


def after_dispatch(
    patch: Patch, function: Callable[[Any], None], begin: Callable[[], None] = lambda: None
) -> None:
    """Call ``function`` with each dispatched model, and ``begin`` when the patch is applied."""

    def attach(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if kwargs.get("module_name"):
            return result
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if not given.get("module_name"):
            function(given["module"])
        return result

    def applied(original: Any) -> Any:
        begin()
        return calling(attach)(original)

    for name in _ATTACH:
        patch.replaces("accelerate.hooks", name)(applied)
