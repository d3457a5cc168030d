"""``prepare_model_for_compiled_hotswap`` loses the scalings of offloaded layers.

PEFT makes a tensor of each LoRA scaling, on the device of the base layer's weight.  An offloaded
weight is on meta, so the scaling has no value there, and the next forward mixes two devices.

The fix makes these tensors first, on the layers' execution devices.  PEFT keeps them.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ...model.hooks import execution_device
from ._adapter_layer import base_layer

PATCH = Patch(
    name="hotswap_scalings",
    symptom=(
        "Tensor on device meta is not on the expected device, after PEFT's "
        "prepare_model_for_compiled_hotswap of a split model"
    ),
    affects=("transformers", "accelerate", "peft"),
    requires=("peft_redispatch",),
    unreported="Found by running PEFT's hot-swap on a split model; no report is known upstream.",
)


@PATCH.probe
def scaling_goes_to_the_weight() -> Finding:
    """Check whether a scaling is put on the device of the weight."""
    code = code_at("peft.utils.hotswap", "_convert_scalings_to_tensor")
    return fixed_if(not mentions(code, "weight"), "scalings are not put where the weight is")


@PATCH.around("peft.utils.hotswap", "_convert_scalings_to_tensor")
def convert_scalings_to_tensor(original: Any, model: Any) -> Any:
    import torch

    for layer in model.modules():
        device = execution_device(base_layer(layer))
        scalings = vars(layer).get("scaling")
        if device is not None and isinstance(scalings, dict):
            floats = {name: value for name, value in scalings.items() if isinstance(value, float)}
            scalings.update({n: torch.tensor(v, device=device) for n, v in floats.items()})
    return original(model)
