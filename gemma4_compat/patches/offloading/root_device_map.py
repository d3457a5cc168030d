"""A device map entry also places modules that have another entry, and accelerate applies it first.

``attach_align_device_hook_on_blocks`` visits the modules of a model from the root.  At a module
that the map names, it places the *whole* module, and attaches a hook for that device to every
module inside.  Only then does it visit the entries further down.  An entry for "" covers the whole
model, so the main GPU must hold all of it for a moment, including the modules for the CPU, the disk
and other GPUs.  The hooks also stay.  If a further entry sends a module to a second GPU, the
modules inside still send their inputs to the first.  Each offloaded module has two hooks, in a
``SequentialHook``.

The fix splits such entries up.  It replaces "" by the highest modules that contain no other entry.
The remaining modules are containers whose modules are on different devices.  They get a hook that
places only the tensors that they hold themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from ...model.device_maps import Placement, above, differs

PATCH = Patch(
    name="root_device_map",
    symptom=(
        'a device map with an entry for "" needs GPU memory for the whole model while loading, '
        "whatever else it offloads, and fails with 'found at least two devices' if it names a "
        "second GPU"
    ),
    affects=("transformers", "accelerate"),
    unreported="Found by the tests of this package; no report is known upstream.",
)

#: The arguments that the replacement reads.
_BY_NAME = ("module", "execution_device", "offload", "module_name", "skip_keys", "tied_params_map")


@PATCH.probe
def entry_covers_all_below() -> Finding:
    """Give a module and a module inside it different entries, and check the hooks."""
    import torch
    from accelerate.hooks import SequentialHook, attach_align_device_hook_on_blocks

    parameters = inspect.signature(attach_align_device_hook_on_blocks).parameters
    gone = [name for name in _BY_NAME if name not in parameters]
    if gone:
        return drifted(f"attach_align_device_hook_on_blocks has no parameter {', '.join(gone)}")
    model = torch.nn.Module()
    model.part = torch.nn.Linear(1, 1)
    values = {f"part.{name}": tensor for name, tensor in model.part.state_dict().items()}
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": "cpu", "part": "cpu"},
        offload={"": False, "part": True},
        weights_map=values,
    )
    if isinstance(model.part._hf_hook, SequentialHook):
        return broken()
    return fixed('accelerate excludes modules with their own entry from the entry for ""')


@PATCH.around("accelerate.hooks", "attach_align_device_hook_on_blocks")
def attach_align_device_hook_on_blocks(original: Any, *args: Any, **kwargs: Any) -> Any:
    # The function calls itself for every module, and passes the module's name by keyword.
    if kwargs.get("module_name"):
        return original(*args, **kwargs)
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    devices, offload = given["execution_device"], given["offload"]
    if isinstance(devices, Mapping) and isinstance(offload, Mapping):
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module

        placement = {n: (devices[n], off) for n, off in offload.items() if n in devices}
        placement, containers = _split_up(given["module"], placement)
        options = {name: given[name] for name in ("skip_keys", "tied_params_map")}
        for module, device in containers:
            add_hook_to_module(module, AlignDevicesHook(device, **options))
        moved = {name: device for name, (device, _) in placement.items()}
        given["execution_device"] = {**devices, **moved}
        given["offload"] = {name: off for name, (_, off) in placement.items()}
    return original(*call.args, **call.kwargs)


def _split_up(root: Any, placement: Placement) -> tuple[Placement, list[tuple[Any, Any]]]:
    """Replace entries that cover others by entries for the highest modules that do not.

    ``placement`` maps module names to (execution device, whether offloaded).  Returns the new
    placement, and the containers that no entry covers any more, each with its execution device,
    but without the root.  An offloaded module that covers another entry keeps its entry.
    """
    split = {outer for name in placement for outer in above(name) if differs(name, placement)}
    result = dict(placement)
    containers = []

    def visit(module: Any, name: str, inherited: tuple[Any, bool] | None) -> None:
        own = placement.get(name, inherited)
        if own is not None and (name not in split or own[1]):
            result[name] = own
        elif name in split:
            result.pop(name, None)
            if name and own is not None:
                containers.append((module, own[0]))
            for child_name, child in module.named_children():
                visit(child, f"{name}.{child_name}" if name else child_name, own)

    if split:
        visit(root, "", None)
    return result, containers
