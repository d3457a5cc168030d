"""LoRA-GA finds no gradients of offloaded layers.

``preprocess_loraga`` runs training steps and then reads ``weight.grad`` of the target modules.  The
weight of an offloaded module is another parameter in each forward; the gradient goes with it when
the module is offloaded again, and the parameter on meta that stays has none.

The gradients in a cache file are read to the device of the model's first parameter, which is meta
with the vision tower offloaded.

The fix has the target modules loaded for all of the steps.  Their gradients, which take as much
memory, stay on that device anyway.  The cache file is read to where modules compute.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._code import mentions
from .._offload import computing_device, onloaded

PATCH = Patch(
    name="lora_ga_offload",
    symptom="AttributeError: 'NoneType' object has no attribute 'detach' from preprocess_loraga",
    affects=("transformers", "accelerate", "peft>=0.19"),
    # Adapters of offloaded layers are made, and their share is taken out, by that patch.
    requires=("peft_redispatch",),
    changes=(
        "preprocess_loraga keeps offloaded target modules loaded while it runs training steps, and "
        "reads its cache file to a device."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)

_LORA_GA = "peft.tuners.lora.loraga"


@PATCH.probe
def weights_are_not_brought_in() -> Finding:
    """Look whether LoRA-GA brings weights in like merging."""
    import inspect

    from peft.tuners.lora.loraga import estimate_gradients

    code = getattr(inspect.unwrap(estimate_gradients), "__code__", None)
    if code is None:
        return drifted("estimate_gradients is not a plain function")
    if mentions(code, "onload"):
        return fixed("LoRA-GA brings offloaded weights in itself")
    return broken()


@PATCH.replaces(_LORA_GA, "estimate_gradients")
def estimate_gradients(original: Any) -> Any:
    from peft.tuners.lora.loraga import get_target_modules

    @wraps(original)
    def estimate_gradients(model: Any, lora_config: Any, *args: Any, **kwargs: Any) -> Any:
        with onloaded(*(module for _, module in get_target_modules(model, lora_config))):
            return original(model, lora_config, *args, **kwargs)

    return estimate_gradients


@PATCH.replaces(_LORA_GA, "get_model_device")
def get_model_device(original: Any) -> Any:
    return computing_device(original)
