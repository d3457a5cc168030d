"""CorDA cannot prepare a split model.

``preprocess_corda`` decomposes the weights of the target modules outside their forwards, when an
offloaded weight is on meta.  It also uses the device of the model's first parameter as that of the
model.  If the vision tower is offloaded, this device is meta, and CorDA moves its matrices to meta.

The fix onloads each weight while it is decomposed, and uses the execution device of the model.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._code import mentions
from .._offload import computing_device, onloaded

PATCH = Patch(
    name="corda_offload",
    symptom=(
        "Tensor on device meta is not on the expected device, or Tensor.item() cannot be called "
        'on meta tensors, from preprocess_corda or LoraConfig(init_lora_weights="corda")'
    ),
    affects=("transformers", "accelerate", "peft"),
    # That patch creates the adapters of offloaded layers, and subtracts them from the weights.
    requires=("peft_redispatch",),
    changes="preprocess_corda onloads the weights of offloaded target modules.",
    unreported="Found by the tests of this package; no report is known upstream.",
)

_CORDA = "peft.tuners.lora.corda"


@PATCH.probe
def weights_are_not_onloaded() -> Finding:
    """Look whether CorDA onloads weights, as merging does."""
    import inspect

    from peft.tuners.lora.corda import collect_eigens_for_layer

    code = getattr(inspect.unwrap(collect_eigens_for_layer), "__code__", None)
    if code is None:
        return drifted("collect_eigens_for_layer is not a plain function")
    if mentions(code, "onload"):
        return fixed("CorDA onloads offloaded weights itself")
    return broken()


@PATCH.replaces(_CORDA, "collect_eigens_for_layer")
def collect_eigens_for_layer(original: Any) -> Any:
    @wraps(original)
    def collect_eigens_for_layer(linear: Any, *args: Any, **kwargs: Any) -> Any:
        with onloaded(linear):
            return original(linear, *args, **kwargs)

    return collect_eigens_for_layer


@PATCH.replaces(_CORDA, "get_model_device")
def get_model_device(original: Any) -> Any:
    return computing_device(original)
