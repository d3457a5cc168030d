"""Reading accelerate's offload hooks, and loading an offloaded module for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._shadow import shadowed


def offload_hook(module: Any) -> Any | None:
    """The hook that brings this module's own weights in and out, if there is one.

    A module with a second hook carries accelerate's ``SequentialHook``.
    """
    return next((hook for hook in hooks_of(module) if getattr(hook, "offload", False)), None)


def execution_device(module: Any) -> Any | None:
    """The ``torch.device`` that an offloaded module computes on; ``None`` if not offloaded."""
    import torch

    hook = offload_hook(module)
    device = None if hook is None else hook.execution_device
    return None if device is None else torch.device(device)


def hooks_of(module: Any) -> tuple[Any, ...]:
    """The accelerate hooks of a module; a ``SequentialHook`` counts as the hooks that it holds."""
    hook = vars(module).get("_hf_hook")
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


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
    resting = {name: host_tensor(hook.weights_map, name) for name in values}
    if any(not _takes(resting[name], value) for name, value in values.items()):
        hook.weights_map = values
        return
    with torch.no_grad():
        for name, value in values.items():
            if resting[name].data_ptr() != value.data_ptr():
                resting[name].copy_(value)


def _takes(resting: Any | None, value: Any) -> bool:
    return resting is not None and (resting.shape, resting.dtype) == (value.shape, value.dtype)


def host_tensor(weights_map: Any, name: str) -> Any | None:
    """A tensor that a hook loads, if it is kept in host memory: itself, not a copy."""
    key = getattr(weights_map, "prefix", "") + name
    tensors = getattr(weights_map, "dataset", weights_map)
    tensors = getattr(tensors, "state_dict", tensors)  # of accelerate's OffloadedWeightsLoader
    return tensors.get(key) if isinstance(tensors, dict) else None


def offloaded_value(model: Any, name: str) -> Any | None:
    """The tensor of this name in a model's state dict, on the host, if a hook offloads it."""
    import torch

    # A hook that loads all below it at once sits further up than the tensor's own module.
    parent, _, name = name.rpartition(".")
    while True:
        hook = offload_hook(model.get_submodule(parent))
        if hook is not None:
            try:
                tensor = hook.weights_map[name]
            except KeyError:
                pass
            else:
                # Weights on disk would be read to the GPU; a shard of them may not fit there.
                return tensor.detach().as_subclass(torch.Tensor).to("cpu")
        if not parent:
            return None
        parent, _, leaf = parent.rpartition(".")
        name = f"{leaf}.{name}"


@contextmanager
def executing_map(model: Any) -> Iterator[dict[str, Any]]:
    """Let ``hf_device_map`` say where modules *execute*, in place of where their weights rest.

    Code that reads "cpu" or "disk" off the map dispatches or loads as if the offloaded modules
    computed there.  ``torch.device("cpu")``, which is not equal to ``"cpu"``, stands for modules
    that really do.
    """
    import torch

    base = _holder(model)
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
    return _holder(model) is not None


def _holder(model: Any) -> Any | None:
    """The module that owns ``hf_device_map``: a base model, through any PEFT wrappers."""
    while model is not None:
        if vars(model).get("hf_device_map") is not None:
            return model
        children = getattr(model, "_modules", {})
        model = children.get("base_model") or (
            children.get("model") if hasattr(model, "peft_config") else None
        )
    return None
