"""A QAT checkpoint in Google's own format does not load with linear layers on the disk.

``from_pretrained`` leaves a weight for the disk on meta, and sets ``_is_hf_initialized`` only on
the others.  So it draws random values for that weight on meta, which has no effect if they are
floats.  ``QuantizedLinear`` is a subclass of ``nn.Linear`` whose weight holds integers, and those
cannot be drawn: ``normal_`` raises.

The fix sets the flag on the meta weights of these layers before the weights are loaded.  A weight
that the checkpoint lacks still gets no values: transformers replaces it, and raises as before.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions

_FLAG = "_is_hf_initialized"
_MODULE = "transformers.quantizers.quantizer_gemma"

PATCH = Patch(
    name="gemma_quant_disk",
    symptom=(
        "from_pretrained of a QAT checkpoint (mobile) with layers on the disk: expected a "
        "floating-point or complex dtype, but got dtype=torch.uint8 (or torch.int8)"
    ),
    affects=("transformers>=5.11",),
    changes="from_pretrained draws no random values for a packed weight that is on the disk.",
    unreported="Found by loading a random checkpoint in this format with parts on the disk.",
)


@PATCH.probe
def weights_on_disk_are_not_marked() -> Finding:
    """Check whether the loader marks a weight that it leaves on the disk."""
    loader = code_at("transformers.core_model_loading", "offload_and_maybe_resave_param")
    return fixed_if(mentions(loader, _FLAG), "the loader marks weights on the disk as initialized")


@PATCH.around(_MODULE, "GemmaQuantizer._process_model_before_weight_loading")
def process_model_before_weight_loading(original: Any, self: Any, model: Any, **kwargs: Any) -> Any:
    result = original(self, model, **kwargs)
    from transformers.integrations.gemma_quant import QuantizedLinear

    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module.weight.is_meta:
            setattr(module.weight, _FLAG, True)
    return result
