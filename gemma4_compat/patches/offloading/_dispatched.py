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
    copies_hooks(patch)
    after_dispatch(patch, way.dispatched, begin=way.start)
    patch.on_revert(way.stop)


def copies_hooks(patch: Patch) -> None:
    """The patch does what the methods of accelerate's hooks do, in another way."""
    patch.copies(
        "accelerate.hooks", "AlignDevicesHook.pre_forward", "56c059d1fef0 5684ff80a0a5 2794f7f45a6d"
    )
    patch.copies("accelerate.hooks", "AlignDevicesHook.post_forward", "f76d21a34059 d3cc269c1b24")


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
