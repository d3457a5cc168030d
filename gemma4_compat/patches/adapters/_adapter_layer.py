"""PEFT layers around an offloaded base layer."""

from __future__ import annotations

import sys
from typing import Any

from ...model.hooks import offload_hook
from ...runtime.host.onloading import offload, onload

#: Attribute of a layer: the hook of its base layer, for each forward in progress.
_FORWARDS = "_forwards_with_offloaded_base_layer"


def base_layer(module: Any) -> Any:
    """The base layer of a PEFT layer, or the module itself if it is no PEFT layer."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def onload_in_forward(layer: Any) -> None:
    """Onload an offloaded base layer for the whole forward of the PEFT layer around it.

    DoRA, HRA and others compute with the base weight outside the base layer's own forward, where
    it is on meta.  No additional transfer happens: meanwhile the base layer's hook does nothing.
    """
    base = base_layer(layer)
    if base is not layer and offload_hook(base) is not None:
        if _after_forward not in layer._forward_hooks.values():
            layer.register_forward_hook(_after_forward, always_call=True)
        if _before_forward not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_before_forward, prepend=True)


def _before_forward(layer: Any, args: Any) -> None:
    forwards = vars(layer).setdefault(_FORWARDS, [])
    while forwards and not _runs_already(layer):  # torch calls no hook after an interrupt
        _after_forward(layer, args, None)
    if getattr(layer, "disable_adapters", False) and getattr(layer, "merged", False):
        unmerge(layer)
    # Without inputs, the hook of an embedding loads the whole weight instead of the needed rows.
    # LoRA on a parameter replaces the whole weight.
    inputs = () if hasattr(layer, "parameter_name") else args
    base = base_layer(layer)  # its hook may have been replaced since
    forwards.append(offload_hook(base))
    onload(base, *inputs)


def unmerge(layer: Any) -> None:
    """Unmerge a PEFT layer with its weights, and those of its adapters, onloaded.

    With adapters disabled, the forward of a merged layer begins with this.  It has to be done
    before, because a quantized weight that ran once may be in another layout than the one to keep.
    """
    from peft.tuners import tuners_utils

    with tuners_utils.onload_layer(layer):
        layer.unmerge()


def _after_forward(layer: Any, args: Any, output: Any) -> None:
    forwards = vars(layer).get(_FORWARDS)
    if not forwards:  # another pre-hook raised first
        return
    if forwards[-1] is not None:
        offload(base_layer(layer), forwards[-1])
    forwards.pop()


def _runs_already(layer: Any) -> bool:
    """Whether a forward of this layer runs, besides the one that begins."""
    running = 0
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is layer:
                running += 1
            frame = frame.f_back  # type: ignore[assignment]
    return running > 1
