"""Loading an offloaded module for a while, and reading the map by where modules execute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..model.hooks import execution_device, offload_hook, placed_model
from ._shadow import shadowed


@contextmanager
def onloaded(module: Any, *, keep_changes: bool = False) -> Iterator[None]:
    """Have an offloaded module's weights on its execution device, as during its forward.

    With ``keep_changes``, what the block makes of the weights is what is loaded from now on.
    """
    hook = offload_hook(module)
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
        if keep_changes:
            hook.weights_map = {name: p.detach().cpu() for name, p in module.named_parameters()}
    finally:
        hook.post_forward(module, None)


@contextmanager
def executing_map(model: Any) -> Iterator[dict[str, Any]]:
    """Let ``hf_device_map`` say where modules *execute*, in place of where their weights rest.

    Code that reads "cpu" or "disk" off the map dispatches or loads as if the offloaded modules
    computed there.  ``torch.device("cpu")``, which is not equal to ``"cpu"``, stands for modules
    that really do.
    """
    import torch

    base = placed_model(model)
    if base is None:
        yield {}
        return
    executing = {}
    for name, device in base.hf_device_map.items():
        if device in ("cpu", "disk"):
            # Maps may name modules that the model does not have; accelerate ignores those.
            inside = (m for n, m in base.named_modules() if n == name or n.startswith(f"{name}."))
            found = (execution_device(module) for module in inside)
            device = next((d for d in found if d is not None), torch.device("cpu"))
        executing[name] = device
    with shadowed(base, hf_device_map=executing):
        yield executing


def is_dispatched(model: Any) -> bool:
    """Whether the model, or the base model in it, was placed by a device map."""
    return placed_model(model) is not None
