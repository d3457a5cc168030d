"""accelerate refuses to train a 4-bit model with a part on disk.

``Accelerator.prepare_model``, which every ``Trainer`` calls, reads ``hf_device_map``.  It refuses a
4-bit model with "disk" in the map, and one with "cpu" if bitsandbytes has no CPU backend.  This was
right as long as offloading a 4-bit weight destroyed its quant state.  It no longer does, the
offloaded weights are frozen, and backward uses the copy that forward loaded.  So losses and
gradients are those of a model on one device.

The fix shows accelerate the execution devices, which its other checks are about.  A model with
trainable parameters among the offloaded ones is refused as before, because the optimizer cannot
update a parameter on meta.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at
from ...runtime.host.onloading import executing_map

PATCH = Patch(
    name="kbit_offload_training",
    symptom=(
        "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk "
        "offload"
    ),
    affects=("transformers", "accelerate", "bitsandbytes"),
    note="accelerate refuses this on purpose.",
    requires=("quant_state_offload",),
    unreported=("A limit of the design: accelerate refuses it on purpose."),
)


@PATCH.probe
def offloaded_models_are_refused() -> Finding:
    """Search the code for the text of the exception."""
    code = code_at("accelerate.accelerator", "Accelerator.prepare_model")
    raises = any("CPU or disk offload" in text for text in code.co_consts if isinstance(text, str))
    return fixed_if(not raises, "Accelerator.prepare_model no longer refuses offloaded models")


@PATCH.around("accelerate.accelerator", "Accelerator.prepare_model")
def accelerator_prepare_model(
    original: Any, self: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    if not getattr(model, "is_loaded_in_4bit", False) or any(
        parameter.is_meta and parameter.requires_grad for parameter in model.parameters()
    ):
        return original(self, model, *args, **kwargs)
    with executing_map(model):
        return original(self, model, *args, **kwargs)
