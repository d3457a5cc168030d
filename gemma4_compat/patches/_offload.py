"""Loading an offloaded module for a while, and reading the map by where modules execute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ..model.hooks import (
    execution_device,
    hooks_of,
    host_tensor,
    input_device,
    offload_hook,
    placed_model,
)
from ._shadow import shadowed

#: How many rows of a weight are compared at a time.
_ROWS = 8192


def onload(module: Any, *inputs: Any) -> Any | None:
    """Load an offloaded module's weights, as its hook does before a forward with these inputs.

    Returns the hook, for ``offload``; ``None`` where there is nothing to load.  Until then the hook
    leaves the weights alone, so the module may run, or be loaded again, in between.
    """
    hook = offload_hook(module)
    if hook is not None:
        hook.pre_forward(module, *inputs)
        hook.offload = False
    return hook


def offload(module: Any, hook: Any, *, keep_changes: bool = False) -> None:
    """Undo ``onload``.

    With ``keep_changes``, the weights as they are now are what the hook loads from now on.
    """
    hook.offload = True
    if hook not in hooks_of(module):  # removed or replaced meanwhile: the weights are no longer its
        return
    if keep_changes:
        _keep(hook, module)
    hook.post_forward(module, None)


@contextmanager
def onloaded(*modules: Any, keep_changes: bool = False) -> Iterator[None]:
    """Have the weights of offloaded modules on their execution devices, as during a forward.

    With ``keep_changes``, what the block makes of the weights is what is loaded from now on.
    """
    loaded: list[tuple[Any, Any]] = []
    try:
        for module in modules:
            hook = onload(module)
            if hook is not None:
                loaded.append((module, hook))
        yield
    except BaseException:
        keep_changes = False
        raise
    finally:
        for module, hook in reversed(loaded):
            offload(module, hook, keep_changes=keep_changes)


def has_changed(module: Any, hook: Any) -> bool:
    """Whether floating-point weights that a hook has loaded are not those that it loads any more.

    What quantised weights hold may be laid out anew for the device that they are on.
    """
    import torch

    for name, parameter in module.named_parameters(recurse=hook.place_submodules):
        if type(parameter) is torch.nn.Parameter:
            resting = hook.weights_map[name]
            if resting.shape != parameter.shape:
                return True
            pairs = zip(parameter.detach().split(_ROWS), resting.split(_ROWS), strict=True)
            if not all(torch.equal(part, rest.to(part.device)) for part, rest in pairs):
                return True
    return False


def _keep(hook: Any, module: Any) -> None:
    """Have a hook load a module's weights as they are now.

    Weights in host memory are overwritten, for other modules may be tied to them.
    """
    import torch
    from accelerate.utils import named_module_tensors

    values = {}
    for name, tensor in named_module_tensors(
        module,
        include_buffers=hook.offload_buffers,
        recurse=hook.place_submodules,
        remove_non_persistent=True,
    ):
        values[name] = tensor.detach().cpu()
        statistics = getattr(tensor, "SCB", None)
        if statistics is not None:  # the row statistics of an 8-bit weight
            values[name.replace("weight", "SCB")] = statistics.cpu()
    resting: dict[str, Any] = {name: host_tensor(hook.weights_map, name) for name in values}
    if any(not _takes(resting[name], value) for name, value in values.items()):
        hook.weights_map = values
        return
    with torch.no_grad():
        for name, value in values.items():
            if resting[name].data_ptr() != value.data_ptr():
                resting[name].copy_(value)


def _takes(resting: Any | None, value: Any) -> bool:
    return resting is not None and (resting.shape, resting.dtype) == (value.shape, value.dtype)


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


def computing_device(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Have a function that names the device of a model name one that it computes on, not meta."""
    import torch

    @wraps(original)
    def get_model_device(model: Any) -> Any:
        found = original(model)
        if torch.device(found).type != "meta":
            return found
        device = execution_device(model)
        return input_device(model) if device is None else device

    return get_model_device
