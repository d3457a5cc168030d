"""A model that was loaded from a quantized checkpoint cannot be saved.

``save_pretrained`` undoes the changes that ``from_pretrained`` made to the names and tensors of a
checkpoint, by reversing each conversion of the load.  For a checkpoint that bitsandbytes quantized,
one of these conversions builds a quantized weight from several tensors.  It has no reverse.

No reverse is needed: the bitsandbytes layers write these very tensors to the state dict.  The fix
leaves these conversions out while a state dict is converted back.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...objects import variant

PATCH = Patch(
    name="quantized_resave",
    symptom=(
        "save_pretrained of a model that was loaded from a 4-bit or 8-bit checkpoint: "
        "NotImplementedError; of a split one: We could not revert some weight conversions because "
        "of offlading"
    ),
    affects=("transformers", "bitsandbytes"),
    links=("https://github.com/huggingface/transformers/pull/45743",),
)

_BITSANDBYTES = "transformers.integrations.bitsandbytes"


@PATCH.probe
def conversions_have_no_reverse() -> Finding:
    """Reverse a conversion that looks like those of bitsandbytes."""
    from transformers.core_model_loading import (
        ConversionOps,
        WeightConverter,
        revert_weight_conversion,
    )

    class Deserialize(ConversionOps):  # type: ignore[misc]
        __module__ = _BITSANDBYTES

        def convert(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    conversion = WeightConverter(["weight", "weight.absmax"], "weight", operations=[Deserialize()])
    try:
        revert_weight_conversion(SimpleNamespace(_weight_conversions=[conversion], config=None), {})
    except NotImplementedError:
        return broken()
    return fixed("conversions without a reverse no longer prevent saving")


@PATCH.around("transformers.core_model_loading", "revert_weight_conversion")
def revert_weight_conversion(original: Any, model: Any, state_dict: Any) -> Any:
    conversions = getattr(model, "_weight_conversions", None) or []
    kept = [conversion for conversion in conversions if not _loads_quantized(conversion)]
    if len(kept) == len(conversions):
        return original(model, state_dict)
    return original(variant(model, _weight_conversions=kept), state_dict)


def _loads_quantized(conversion: Any) -> bool:
    """Whether a conversion builds bitsandbytes weights and has no reverse."""
    operations = getattr(conversion, "operations", None) or ()
    return any(type(op).__module__ == _BITSANDBYTES and _is_irreversible(op) for op in operations)


def _is_irreversible(operation: Any) -> bool:
    try:
        operation.reverse_op  # noqa: B018
    except NotImplementedError:
        return True
    return False
