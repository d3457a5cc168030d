"""accelerate refuses to train a model with offloaded parts in several processes.

``Accelerator.prepare`` raises if the device map of a model has more than one entry.  The check
means models that are spread over several GPUs.  It also meets a model that computes on the GPU of
its process alone and has, for example, its per-layer embeddings in host memory.  DDP would then
copy all parameters to all processes, and ``fully_shard`` would shard them.  Neither can do that
with parameters on the meta device.

The fix shows accelerate one device if all parts of the model compute on the device of the process.
DDP and FSDP2 leave out the offloaded parameters, which accelerate's hooks load as before.  A model
with trainable parameters among the offloaded ones is refused as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...engine.probing import code_at
from ...model.hooks import placed_model
from ...objects import shadowed
from ...runtime.host.onloading import executing_map

PATCH = Patch(
    name="distributed_offload",
    symptom=(
        "You can't train a model that has been loaded with `device_map='auto'` in any distributed "
        "mode, for a model with modules offloaded to the CPU or disk, under DDP or FSDP2"
    ),
    affects=("transformers", "accelerate"),
    note="accelerate refuses this on purpose.",
    unreported=("A limit of the design: accelerate refuses it on purpose."),
)

_ACCELERATOR = "accelerate.accelerator"
_IGNORED = "_ddp_params_and_buffers_to_ignore"


@PATCH.probe
def device_maps_are_refused() -> Finding:
    """Search the code for the check."""
    code = code_at(_ACCELERATOR, "Accelerator.prepare_model")
    if "verify_device_map" in code.co_names:
        return broken()
    return fixed("Accelerator.prepare_model no longer refuses models with a device map")


@PATCH.around(_ACCELERATOR, "Accelerator.prepare")
def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for each in args:
            stack.enter_context(_on_one_device(self, each))
        return original(self, *args, **kwargs)


@PATCH.around(_ACCELERATOR, "Accelerator.prepare_model")
def prepare_model(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    with _on_one_device(self, model) as offloaded:
        if offloaded:
            kwargs["device_placement"], args = False, args[1:]
            ignored = [*getattr(model, _IGNORED, ()), *offloaded]
            setattr(model, _IGNORED, ignored)  # as DistributedDataParallel's own method does
        return original(self, model, *args, **kwargs)


@PATCH.around("accelerate.utils.fsdp_utils", "fsdp2_prepare_model")
def fsdp2_prepare_model(
    original: Any, accelerator: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    modules = [
        module
        for module in model.modules()
        if any(parameter.is_meta for parameter in module.parameters(recurse=False))
    ]
    if not modules or placed_model(model) is None:
        return original(accelerator, model, *args, **kwargs)
    plugin = accelerator.state.fsdp_plugin
    ignored = plugin.ignored_modules or ()
    if isinstance(ignored, str):
        named = model.named_modules()
        ignored = [module for name, module in named if re.fullmatch(plugin.ignored_modules, name)]
        for module in ignored:
            module.to(accelerator.device)
    with shadowed(plugin, ignored_modules=[*ignored, *modules]):
        return original(accelerator, model, *args, **kwargs)


@contextmanager
def _on_one_device(accelerator: Any, model: Any) -> Iterator[list[str]]:
    """Replace the device map by one device during the block, if the model computes there alone.

    Yields the names of the offloaded parameters and buffers.
    """
    import torch

    offloaded = []
    if isinstance(model, torch.nn.Module) and _leaves_out(accelerator):
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        offloaded = [name for name, tensor in tensors.items() if tensor.is_meta]
        with executing_map(model) as executing:
            devices = {_number(torch.device(device)) for device in executing.values()}
        trained = any(tensors[name].requires_grad for name in offloaded)
        if trained or devices != {_number(accelerator.device)}:
            offloaded = []
    if offloaded:
        with shadowed(placed_model(model), hf_device_map={"": accelerator.device}):
            yield offloaded
    else:
        yield []


def _leaves_out(accelerator: Any) -> bool:
    """Whether the engine can leave parameters out; old releases of accelerate cannot for FSDP2."""
    if accelerator.distributed_type.name == "FSDP":
        names = code_at("accelerate.utils.fsdp_utils", "fsdp2_prepare_model").co_names
        return bool(accelerator.is_fsdp2) and "ignored_modules" in names
    return str(accelerator.distributed_type.name).startswith("MULTI_")


def _number(device: Any) -> tuple[str, int | None]:
    """Type and index of a device; accelerate calls the CPU of each process cpu:0."""
    return device.type, None if device.type == "cpu" else device.index
