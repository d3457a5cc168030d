"""A dequantized model keeps PEFT's layers for quantized weights.

``model.dequantize()`` replaces every ``bnb.nn.Linear4bit`` and ``Linear8bitLt`` by an
``nn.Linear``, also inside PEFT's adapter layers, but it does not replace the adapter layers.
PEFT's layers for bitsandbytes still read ``weight.quant_state`` or ``base_layer.state`` when they
merge or unmerge, and some read it in every forward.  Those of AdaLoRA and IA3 have no ``merge``,
because PEFT does not merge them into quantized weights.  The new weights also require gradients, so
an optimizer would train them along with the adapter.

The fix changes these layers into those that PEFT makes for an unquantized model: each gets the
tuner's class for ``nn.Linear``, which stores its adapters in the same attributes.  Some tuners of
newer PEFT releases have one class for both, with a quantization backend; the fix removes it.
"""

from __future__ import annotations

import sys
from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from ...engine.probing import code_at, mentions

PATCH = Patch(
    name="dequantized_merge",
    symptom=(
        "dequantize(), then merge_and_unload(): 'Parameter' object has no attribute "
        "'quant_state' (4-bit) or 'Linear' object has no attribute 'state' (8-bit)"
    ),
    affects=("transformers", "peft", "bitsandbytes"),
    changes=(
        "dequantize() of a model with PEFT adapters turns PEFT's bitsandbytes layers into its "
        "layers for nn.Linear (merge, unmerge and forward are then those of an unquantized model), "
        "keeps the base frozen, and removes is_loaded_in_4bit and is_loaded_in_8bit."
    ),
    unreported=("Found by the tests of this package; no report is known upstream."),
)

#: Attributes that layers for bitsandbytes lack, with the values that PEFT sets for nn.Linear.
_MISSING = {"fan_in_fan_out": False, "is_target_conv_1d_layer": False, "sample_at_inference": False}


@PATCH.probe
def dequantize_leaves_layers() -> Finding:
    """Check that ``dequantize`` calls ``_dequantize`` and does not handle adapters."""
    code = code_at("transformers.quantizers.base", "HfQuantizer.dequantize")
    if "_dequantize" not in code.co_names:
        return drifted("HfQuantizer.dequantize no longer calls _dequantize")
    handled = mentions(code, "peft") or mentions(code, "base_layer")
    return fixed_if(handled, "HfQuantizer.dequantize handles the layers of PEFT")


@PATCH.around("transformers.quantizers.base", "HfQuantizer.dequantize")
def dequantize(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    quantized = [name for name, module in model.named_modules() if _is_quantized(module)]
    model = original(self, model, *args, **kwargs)
    for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
        vars(model).pop(flag, None)
    for layer in list(model.modules()):
        if "base_layer" in layer._modules and hasattr(layer, "get_base_layer"):
            _make_plain(layer)
    if hasattr(model, "peft_config"):  # only the adapters are trainable
        for name in quantized:
            model.get_submodule(name).requires_grad_(False)
    return model


def _is_quantized(module: Any) -> bool:
    return type(module).__module__.startswith("bitsandbytes.")


def _make_plain(layer: Any) -> None:
    """Give a PEFT layer for bitsandbytes the class for ``nn.Linear`` if it now wraps one."""
    if _is_quantized(layer.get_base_layer()):
        return
    if type(getattr(layer, "quantization_backend", None)).__name__.startswith("Bnb"):
        layer.quantization_backend = None
    package, _, module = type(layer).__module__.rpartition(".")
    if package.startswith("peft.tuners.") and module == "bnb":
        name = "SVDLinear" if type(layer).__name__.startswith("SVD") else "Linear"
        layer.__class__ = plain = getattr(sys.modules[f"{package}.layer"], name)
        for attribute in set(plain.__init__.__code__.co_names) & _MISSING.keys():
            vars(layer).setdefault(attribute, _MISSING[attribute])
