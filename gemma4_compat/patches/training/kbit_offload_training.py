"""A 4-bit model of which a part is on disk is refused for training.

``Accelerator.prepare_model``, and with it every ``Trainer``, looks at ``hf_device_map``: a 4-bit
model with "disk" in it cannot be trained, nor one with "cpu" where bitsandbytes has no CPU
backend.  That was wise while offloading a 4-bit weight destroyed its quant state.  It no longer
does, what is offloaded is frozen, and backward works with the copy that forward loaded: losses and
gradients are those of a model on one device.

The fix lets accelerate see where modules *execute*, which is what its other checks are about.  A
model that has parameters to train among the offloaded ones is refused as before: there is nothing
that the optimizer could update.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from .._offload import executing_map, is_dispatched

PATCH = Patch(
    name="kbit_offload_training",
    symptom=(
        "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk "
        "offload"
    ),
    affects=("transformers", "accelerate", "bitsandbytes"),
    changes=(
        "Accelerator.prepare_model takes the offloaded modules of a 4-bit model for modules on "
        "their execution device, if none of their parameters is to be trained."
    ),
    note="accelerate refuses this on purpose.",
    requires=("quant_state_offload",),
    unreported=("A limit of the design: accelerate refuses it on purpose."),
)


@PATCH.probe
def offloaded_models_are_refused() -> Finding:
    """Look for the refusal's words."""
    import inspect

    from accelerate.accelerator import Accelerator

    code = inspect.unwrap(Accelerator.prepare_model).__code__
    if any("CPU or disk offload" in text for text in code.co_consts if isinstance(text, str)):
        return broken()
    return fixed("Accelerator.prepare_model no longer refuses offloaded models")


@PATCH.replaces("accelerate.accelerator", "Accelerator.prepare_model")
def accelerator_prepare_model(original: Any) -> Any:
    @wraps(original)
    def prepare_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not (getattr(model, "is_loaded_in_4bit", False) and is_dispatched(model)):
            return original(self, model, *args, **kwargs)
        if any(parameter.is_meta and parameter.requires_grad for parameter in model.parameters()):
            return original(self, model, *args, **kwargs)
        with executing_map(model):
            return original(self, model, *args, **kwargs)

    return prepare_model
