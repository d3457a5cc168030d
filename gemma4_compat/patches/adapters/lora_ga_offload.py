"""LoRA-GA has no gradients for offloaded layers.

``preprocess_loraga`` runs training steps and then reads ``weight.grad`` of the target modules.  The
weight of an offloaded module is a different parameter in each forward.  Its gradient is lost when
the module is offloaded again, and the parameter on meta that replaces it has none.

LoRA-GA also loads the gradients of a cache file to the device of the model's first parameter.  If
the vision tower is offloaded, that device is meta.

The fix keeps the target modules onloaded during all steps.  Their gradients stay on the execution
device anyway, and take as much memory.  The cache file is loaded to the execution device.
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
    # That patch creates the adapters of offloaded layers, and subtracts them from the weights.
    requires=("peft_redispatch",),
    changes=(
        "preprocess_loraga keeps offloaded target modules onloaded while it runs training steps, "
        "and loads its cache file to the execution device."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)

_LORA_GA = "peft.tuners.lora.loraga"


@PATCH.probe
def weights_are_not_onloaded() -> Finding:
    """Look whether LoRA-GA onloads weights, as merging does."""
    import inspect

    from peft.tuners.lora.loraga import estimate_gradients

    code = getattr(inspect.unwrap(estimate_gradients), "__code__", None)
    if code is None:
        return drifted("estimate_gradients is not a plain function")
    if mentions(code, "onload"):
        return fixed("LoRA-GA onloads offloaded weights itself")
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
