"""A dequantised model keeps PEFT's layers for the quantised one.

``model.dequantize()`` replaces every ``bnb.nn.Linear4bit`` and ``Linear8bitLt`` by an
``nn.Linear``, also inside the layers that PEFT has put around them, but not those themselves.
PEFT's layers for bitsandbytes go on to read ``weight.quant_state`` or ``base_layer.state`` when
they merge or unmerge, and some in every forward.  AdaLoRA's and IA3's have no ``merge`` at all:
PEFT does not merge those into quantised weights.  Also, the new weights require gradients, and an
optimiser would train them along with the adapter.

The fix makes them the layers that PEFT would have made for a model that never was quantised: each
gets the class of its tuner for ``nn.Linear``, which keeps its adapters in the same attributes.
Newer PEFT has tuners with one class for both, which hold a quantisation backend: there that is
removed.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._code import mentions

PATCH = Patch(
    name="dequantized_merge",
    symptom=(
        "dequantize(), then merge_and_unload(): 'Parameter' object has no attribute "
        "'quant_state' (4-bit) or 'Linear' object has no attribute 'state' (8-bit)"
    ),
    affects=("transformers", "peft", "bitsandbytes"),
    changes=(
        "dequantize() of a model with PEFT adapters turns PEFT's bitsandbytes layers into its "
        "plain ones (merge, unmerge and forward are then those of an unquantised model), "
        "keeps the base frozen, and removes is_loaded_in_4bit and is_loaded_in_8bit."
    ),
    unreported=("Found by the tests of this package; no report is known upstream."),
)

#: What some plain layers hold that those for bitsandbytes do not, as PEFT sets it for nn.Linear.
_MISSING = {"fan_in_fan_out": False, "is_target_conv_1d_layer": False, "sample_at_inference": False}


@PATCH.probe
def dequantize_leaves_layers() -> Finding:
    """Look whether dequantize calls ``_dequantize``, and does nothing about adapters."""
    import inspect

    from transformers.quantizers.base import HfQuantizer

    code = getattr(inspect.unwrap(HfQuantizer.dequantize), "__code__", None)
    if code is None or "_dequantize" not in code.co_names:
        return drifted("HfQuantizer.dequantize no longer calls _dequantize")
    if mentions(code, "peft") or mentions(code, "base_layer"):
        return fixed("HfQuantizer.dequantize handles the layers of PEFT")
    return broken()


@PATCH.replaces("transformers.quantizers.base", "HfQuantizer.dequantize")
def dequantize(original: Any) -> Any:
    @wraps(original)
    def dequantize(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        quantized = [name for name, module in model.named_modules() if _is_quantized(module)]
        model = original(self, model, *args, **kwargs)
        for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
            vars(model).pop(flag, None)
        for layer in list(model.modules()):
            if "base_layer" in layer._modules and hasattr(layer, "get_base_layer"):
                _make_plain(layer)
        if hasattr(model, "peft_config"):  # adapters are trained, not the base
            for name in quantized:
                model.get_submodule(name).requires_grad_(False)
        return model

    return dequantize


def _is_quantized(module: Any) -> bool:
    return type(module).__module__.startswith("bitsandbytes.")


def _make_plain(layer: Any) -> None:
    """Make a PEFT layer for bitsandbytes the one for ``nn.Linear``, if that is inside now."""
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
