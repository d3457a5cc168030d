"""``save_pretrained`` cannot read the tensors of some offloaded models.

If a tensor of the state dict is on meta, transformers reads it from the ``weights_map`` of the
first hook between the tensor's module and the root of the model.  This is right only if the module
has a single hook.  A device map with an entry for "" gives offloaded modules two hooks, in a
``SequentialHook`` that has no ``weights_map``.

Two more assumptions are wrong.  transformers decides by ``hf_device_map`` whether a model is
offloaded, but ``cpu_offload``, ``disk_offload`` and the parts of a dispatched model have none.  It
also treats every tensor on meta as a parameter, but buffers may be offloaded, too.  The row
statistics of 8-bit layers (``SCB``) go to meta with their weight, and after a forward they are
missing altogether.

The fix asks the hooks in all these cases.  It still reads the weights one shard at a time.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...errors import RefusedError
from ...model.hooks import offload_hook, offloaded_value
from ...objects import shadowed, variant

PATCH = Patch(
    name="offloaded_save",
    symptom=(
        "save_pretrained of a model with offloaded modules: 'SequentialHook' object has no "
        "attribute 'weights_map', Cannot copy out of meta tensor; no data!, or (8-bit) `...SCB` "
        "is neither a parameter, buffer, nor extra state"
    ),
    affects=("transformers", "accelerate"),
    unreported=(
        "Parts are in a closed pull request (transformers #46902); no report of SequentialHook is "
        "known upstream."
    ),
)


@PATCH.probe
def sequential_hook_is_overlooked() -> Finding:
    """Read a tensor of a module with two hooks, as dispatch_model attaches them."""
    import torch
    from accelerate.hooks import AlignDevicesHook, SequentialHook
    from transformers.integrations.accelerate import load_offloaded_parameter

    weight = torch.zeros(1)
    model = torch.nn.Module()
    model.part = torch.nn.Module()
    offload = AlignDevicesHook(offload=True, weights_map={"weight": weight})
    model.part._hf_hook = SequentialHook(AlignDevicesHook(), offload)
    try:
        value = load_offloaded_parameter(model, "part.weight")
    except AttributeError:
        return broken()
    return fixed("transformers uses the offload hook") if value is weight else broken()


PATCH.copies(
    "transformers.integrations.accelerate", "load_offloaded_parameter", "609894a8fbd0 5b0ea3008317"
)


@PATCH.around("transformers.integrations.accelerate", "load_offloaded_parameter")
def load_offloaded_parameter(original: Any, model: Any, param_name: str) -> Any:
    value = offloaded_value(model, param_name)
    if value is None:
        raise RefusedError(
            f"{param_name} is on the meta device, and no offload hook has its values: it was "
            f"never loaded, or its hook was removed.  Load the model again.  "
            f"gemma4_compat.inspection.inspect_model(model) lists the modules without values."
        )
    return value


@PATCH.around("transformers.modeling_utils", "PreTrainedModel.save_pretrained")
def save_pretrained(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    offloaded = [module for module in self.modules() if offload_hook(module) is not None]
    if not offloaded:
        return original(self, *args, **kwargs)
    own_state_dict = self.state_dict

    @wraps(own_state_dict)
    def state_dict(*args: Any, **kwargs: Any) -> Any:
        return _only_parameters_on_meta(self, own_state_dict(*args, **kwargs))

    # transformers only checks whether the map has several devices, and the CPU or the disk.
    split = {"": "cpu", "offloaded": "disk"}
    read = variant(self, state_dict=state_dict, hf_device_map=split)
    call = inspect.signature(original).bind(read, *args, **kwargs)
    if call.arguments.get("state_dict") is not None:
        given = dict(call.arguments["state_dict"])
        call.arguments["state_dict"] = _only_parameters_on_meta(self, given)
    with ExitStack() as stack:
        for module in offloaded:
            statistics = _row_statistics(module)
            if statistics is not None:
                stack.enter_context(shadowed(module.weight, SCB=statistics))
        return original(*call.args, **call.kwargs)


def _only_parameters_on_meta(model: Any, state_dict: Any) -> Any:
    """Load offloaded buffers, and leave out tensors that are tied to another one.

    The first forward unties parameters on meta, because each module then has its own placeholder.
    """
    import torch
    from transformers.integrations.accelerate import load_offloaded_parameter

    def value(name: str) -> Any:
        tensor = state_dict[name]
        return load_offloaded_parameter(model, name) if tensor.is_meta else tensor.to("cpu")

    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    on_meta = {name for name, tensor in state_dict.items() if getattr(tensor, "is_meta", False)}
    for name in on_meta - parameters:
        state_dict[name] = value(name)
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        pair = {name, source}
        # After an interrupt in its forward, an offloaded parameter is not on meta.
        if (
            pair <= state_dict.keys()
            and (pair & on_meta or any(offloaded_value(model, n) is not None for n in pair))
            and torch.equal(value(name), value(source))
        ):
            del state_dict[name]
    return state_dict


def _row_statistics(module: Any) -> Any | None:
    """The statistics of an offloaded 8-bit layer, one number per row; ``None`` for others."""
    hook = offload_hook(module)
    if hook is None or type(module).__name__ != "Linear8bitLt":
        return None
    beside = hook.weights_map.get("SCB")
    return getattr(hook.weights_map["weight"], "SCB", None) if beside is None else beside
