"""Merging into a QAT checkpoint in Google's own format loses the adapter, or stops in arithmetic.

transformers loads such a checkpoint ("mobile") with ``QuantizedLinear``, whose weight holds
integers, and in 2 or 4 bit several of them in a byte.  It is a subclass of ``nn.Linear``, so PEFT
wraps it as one.  With the adapter loaded, the outputs are right, because PEFT adds them to those of
the layer.  Merging adds floats to the integers.  In 8 bit, ``safe_merge=True`` rounds the sum to
integers: the merged model is the base model, without an error.  Else, merging raises an error about
shapes or dtypes.

No merged weight can be right: the layer rounds its outputs with a range that was measured without
the adapter.  The patch refuses the merge and says what to do instead.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed, fixed_if
from ...engine.probing import code_of, mentions
from ...errors import RefusedError

PATCH = Patch(
    name="gemma_quant_merge",
    symptom=(
        "merge_and_unload(safe_merge=True) on a QAT checkpoint in Google's own format (mobile) "
        "gives the base model; without safe_merge: The size of tensor a must match the size of "
        "tensor b, or result type Float can't be cast to the desired output type Char"
    ),
    affects=("transformers>=5.11", "peft"),
    unreported="Found by comparing a merged model with the one that has the adapter loaded.",
)


@PATCH.probe
def merging_adds_to_the_weight() -> Finding:
    """Check that the layers are linear layers for PEFT, and that merging takes no account of it."""
    from peft.tuners.lora.layer import Linear
    from torch import nn
    from transformers.integrations import gemma_quant

    if not issubclass(gemma_quant.QuantizedLinear, nn.Linear):
        return fixed("QuantizedLinear is no nn.Linear: PEFT does not wrap it as one")
    handled = mentions(code_of(Linear.merge), "num_bits")
    return fixed_if(handled, "Linear.merge handles packed weights")


@PATCH.around("peft.tuners.tuners_utils", "BaseTuner._check_merge_allowed")
def check_merge_allowed(original: Any, self: Any) -> Any:
    """PEFT calls this method before every merge, and nowhere else."""
    allowed = original(self)
    from transformers.integrations.gemma_quant import QuantizedLinear

    wrappers = [m for m in self.model.modules() if hasattr(m, "get_base_layer")]
    layers = (each.get_base_layer() for each in wrappers if hasattr(each, "merge"))
    if count := sum(isinstance(layer, QuantizedLinear) for layer in layers):
        raise RefusedError(
            f"an adapter cannot be merged into {count} quantized layers of this QAT checkpoint: "
            "they hold integers, and round their outputs with ranges that were measured without "
            "the adapter.  Keep the adapter loaded, or merge it into the unquantized checkpoint: "
            "gemma4-compat merge BASE ADAPTER OUT"
        )
    return allowed
