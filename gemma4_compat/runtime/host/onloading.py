"""Onloads offloaded modules temporarily, and gives the device map of execution devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...model.hooks import execution_device, hooks_of, host_tensor, offload_hook, placed_model
from ...objects import shadowed
from .forward_lock import lock_of

#: The number of rows of a weight to compare at a time.
_ROWS = 8192


def onload(module: Any, *inputs: Any) -> Any | None:
    """Onload a module's weights, as its hook does before a forward with these inputs.

    Returns the hook, to pass to ``offload``, or ``None`` if the module is not offloaded.  Until
    ``offload``, the hook does nothing, so the module may run or be onloaded again in between.
    """
    hook = offload_hook(module)
    if hook is not None:
        try:
            hook.pre_forward(module, *inputs)
            hook.offload = False
        except BaseException:
            offload(module, hook)
            raise
    return hook


def offload(module: Any, hook: Any, *, keep_changes: bool = False) -> None:
    """Undo ``onload``.

    With ``keep_changes``, the hook loads the weights in their current state from now on.
    """
    hook.offload = True
    if hook not in hooks_of(module):  # the hook was removed or replaced meanwhile
        return
    if keep_changes:
        _keep(hook, module)
    hook.post_forward(module, None)


@contextmanager
def onloaded(*modules: Any, keep_changes: bool | Callable[[], bool] = False) -> Iterator[None]:
    """Onload modules to their execution devices during the block.

    With ``keep_changes``, or if this function returns true after the block, the changes that the
    block makes to the weights are kept, unless the block raises.  No other thread runs these
    modules meanwhile.
    """
    completed, offloaded = False, set()

    def offload_once(module: Any, hook: Any, may_keep: bool) -> None:
        if module not in offloaded:
            wanted = keep_changes if callable(keep_changes) else lambda: keep_changes
            offload(module, hook, keep_changes=may_keep and completed and wanted())
            offloaded.add(module)

    with ExitStack() as stack:
        for module in modules:
            # A forward in progress may have onloaded it.
            stack.enter_context(lock_of(module, turn=60))
            hook = offload_hook(module)
            if hook is not None:
                stack.callback(offload_once, module, hook, False)  # if the first is interrupted
                stack.callback(offload_once, module, hook, True)
                onload(module)
        yield
        completed = True


@contextmanager
def tied_copies_follow(model: Any, modules: list[Any]) -> Iterator[None]:
    """After the block, modules that are tied to these have the same weight.

    Tied weights in host memory are one tensor.  On the disk each module has a copy.
    """
    tied = []
    for module in model.modules():
        for names in (vars(module).get("all_tied_weights_keys") or {}).items():
            first, second = (offloaded_alone(module, name) for name in names)
            if (first in modules) is not (second in modules) and _is_copy(first, second):
                tied.append((first, second) if first in modules else (second, first))
    try:
        yield
    finally:
        for module, copy in tied:
            hook: Any = offload_hook(module)
            vars(offload_hook(copy))["weights_map"] = hook.weights_map


def offloaded_alone(model: Any, name: str) -> Any:
    """The offloaded module that has only this weight, inside PEFT's wrapper, or ``None``."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:  # removed by a user
        return None
    module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    hook = offload_hook(module)
    present = [key for key, value in module._parameters.items() if value is not None]
    alone = hook is not None and not hook.place_submodules and present == [leaf] == ["weight"]
    return module if alone else None


def _is_copy(first: Any, second: Any) -> bool:
    """Whether two modules have the same weight in two places."""
    import torch

    if first is None or second is None:
        return False
    hooks: list[Any] = [offload_hook(first), offload_hook(second)]
    one, other = (hook.weights_map["weight"] for hook in hooks)
    return bool(one.data_ptr() != other.data_ptr() and torch.equal(one, other))


def has_changed(module: Any, hook: Any) -> bool:
    """Whether onloaded floating-point weights differ from the weights that the hook stores.

    Quantized weights are not compared, because their layout may depend on their device.
    """
    import torch

    for name, parameter in module.named_parameters(recurse=hook.place_submodules):
        if type(parameter) is torch.nn.Parameter:
            stored = hook.weights_map[name]
            if stored.shape != parameter.shape:
                return True
            both = map(torch.atleast_1d, (parameter.detach(), stored))  # a scale may be a number
            pairs = zip(*(values.split(_ROWS) for values in both), strict=True)
            if not all(torch.equal(rows, other.to(rows.device)) for rows, other in pairs):
                return True
    return False


def _keep(hook: Any, module: Any) -> None:
    """Make a hook load a module's weights in their current state from now on.

    Weights in host memory are overwritten in place, because other modules may be tied to them.
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
    stored: dict[str, Any] = {name: host_tensor(hook.weights_map, name) for name in values}
    kinds = {name: (t.shape, t.dtype) for name, t in stored.items() if t is not None}
    if any(kinds.get(name) != (value.shape, value.dtype) for name, value in values.items()):
        hook.weights_map = values
        return
    with torch.no_grad():
        for name, value in values.items():
            if not stored[name].is_set_to(value):  # another view of the same memory is a change
                shared = stored[name].data_ptr() == value.data_ptr()
                stored[name].copy_(value.clone() if shared else value)


def hook_of_weight(embedding: Any) -> Any | None:
    """The hook that offloads an embedding's weight, perhaps inside PEFT's wrappers, or ``None``."""
    weight = embedding.weight
    for module in embedding.modules():
        hook = offload_hook(module)
        if hook is not None and module._parameters.get("weight") is weight:
            return hook
    return None


@contextmanager
def executing_map(model: Any) -> Iterator[dict[str, Any]]:
    """Replace ``hf_device_map`` by a map of execution devices during the block.

    Code that reads "cpu" or "disk" in the map assumes that offloaded modules compute on that
    device.  Modules that do compute on the CPU get ``torch.device("cpu")``, which is not equal to
    ``"cpu"``.  Yields the map, which is empty if no part of the model was dispatched.
    """
    import torch

    base = placed_model(model)
    if base is None:
        yield {}
        return
    executing = {}
    for name, device in base.hf_device_map.items():
        if device in ("cpu", "disk"):
            # A map may name modules that the model does not have; accelerate ignores them.
            inside = (m for n, m in base.named_modules() if n == name or n.startswith(f"{name}."))
            devices = (execution_device(module) for module in inside)
            device = next((d for d in devices if d is not None), torch.device("cpu"))
        executing[name] = device
    with shadowed(base, hf_device_map=executing):
        yield executing
