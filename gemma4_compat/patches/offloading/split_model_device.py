"""``model.device`` is ``meta`` once the first module of a split model is offloaded.

``device`` is that of the model's first parameter.  accelerate keeps the parameters of an offloaded
module on the meta device between its forwards, and in Gemma 4 the first parameter is the vision
tower's.  Code that moves tensors to ``model.device`` then turns them into meta tensors: prompt
lookup, assisted generation, ``generate()`` without inputs, and ``processor(...).to(model.device)``.

The fix returns the device that inputs belong on (``gemma4_compat.input_device``).  For a part of a
model without token embeddings it returns the execution device of its first parameter.  It does so
only if upstream returns ``meta`` and a hook onloads that parameter.

``generate`` does not compile a model whose device is meta.  With the fix it still does not compile
offloaded models, even if they have no device map (``cpu_offload``).
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...model.hooks import input_device, offload_hook
from ...objects import shadowed

PATCH = Patch(
    name="split_model_device",
    symptom=(
        "model.device is meta once the vision tower is offloaded: Cannot copy out of meta tensor; "
        "no data!, or Tensor.item() cannot be called on meta tensors, from prompt lookup, assisted "
        "generation, generate() without inputs, processor(...).to(model.device)"
    ),
    affects=("transformers", "accelerate"),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def device_of_an_offloaded_model() -> Finding:
    """Read the device of a model whose only weight is offloaded."""
    import torch
    from transformers.modeling_utils import ModuleUtilsMixin

    class Hook:
        offload = True
        execution_device = "cpu"

    class Model(torch.nn.Linear, ModuleUtilsMixin):  # type: ignore[misc]
        pass

    model = Model(1, 1, bias=False, device="meta")
    model._hf_hook = Hook()
    device = model.device
    return fixed_if(device.type != "meta", f"the device of an offloaded model is {device}")


@PATCH.around("transformers.modeling_utils", "ModuleUtilsMixin.device")
def device(original: Any, self: Any) -> Any:
    own = original(self)
    return _device_of_inputs(self, own) if own.type == "meta" else own


@PATCH.around("transformers.generation.utils", "GenerationMixin._valid_auto_compile_criteria")
def valid_auto_compile_criteria(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if _loading_hook(self) is None:
        return original(self, *args, **kwargs)
    # Upstream does not compile such models.  Not a variant: captured_decoding keeps the model.
    with shadowed(self, hf_device_map={"": "disk"}):
        return original(self, *args, **kwargs)


def _device_of_inputs(model: Any, meta: Any) -> Any:
    import torch

    hook = _loading_hook(model)
    if hook is None:
        return meta
    device = _device_of_token_embeddings(model)
    device = hook.execution_device if device is None else device
    return meta if device is None else torch.device(device)


def _device_of_token_embeddings(model: Any) -> Any | None:
    try:
        # ``generate`` reads the device for each token; ``input_device`` searches the whole model.
        hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        return input_device(model) if device is None else device
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None  # no token embeddings, or they have no values


def _loading_hook(model: Any) -> Any | None:
    """The hook that onloads the first parameter, or ``None`` if it is not offloaded."""
    name, parameter = next(model.named_parameters(), ("", None))
    if parameter is None or parameter.device.type != "meta":
        return None
    while name:
        name = name.rpartition(".")[0]
        hook = offload_hook(model.get_submodule(name))
        if hook is not None:
            return hook
    return None
