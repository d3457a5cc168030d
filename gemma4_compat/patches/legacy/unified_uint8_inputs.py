"""A quantized Gemma 4 unified truncates images and sound to integers.

This is the same bug as in the towers of Gemma 4 (see ``vision_uint8_pixels``): the embedders of
pixels and of sound cast to the dtype of a weight, which is uint8 or int8 if it is quantized.

The fix casts pixels to the dtype of the position embeddings, as an unquantized model does.  The
inputs of ``Gemma4UnifiedMultimodalEmbedder`` keep their floating-point dtype.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from .._code import code_of
from ._claimed_dtype import claiming

PATCH = Patch(
    name="unified_uint8_inputs",
    symptom=(
        "a 4-bit or 8-bit Gemma4Unified model ignores audio; it ignores images, or raises "
        "mixed dtype (CPU)"
    ),
    affects=("transformers>=5.10,<5.13", "bitsandbytes"),
    changes="Image and audio inputs keep a floating-point dtype if a layer is quantized.",
    links=(
        "https://github.com/huggingface/transformers/issues/46899",
        "https://github.com/huggingface/transformers/pull/46904",
    ),
)

_MODULE = "transformers.models.gemma4_unified.modeling_gemma4_unified"


@PATCH.probe
def casts_to_any_dtype() -> Finding:
    """Check whether the forward casts only to floating-point dtypes."""
    from transformers.models.gemma4_unified.modeling_gemma4_unified import (
        Gemma4UnifiedVisionEmbedder,
    )

    asks = "is_floating_point" in code_of(Gemma4UnifiedVisionEmbedder.forward).co_names
    return fixed_if(asks, "inputs are no longer cast to an integer dtype")


@PATCH.around(_MODULE, "Gemma4UnifiedVisionEmbedder.forward")
def vision_embedder_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    claimed = claiming(self, "patch_dense", self.pos_embedding.dtype)
    return original(claimed, *args, **kwargs)


@PATCH.around(_MODULE, "Gemma4UnifiedMultimodalEmbedder.forward")
def multimodal_embedder_forward(
    original: Any, self: Any, inputs_embeds: Any, *args: Any, **kwargs: Any
) -> Any:
    claimed = claiming(self, "embedding_projection", inputs_embeds.dtype)
    return original(claimed, inputs_embeds, *args, **kwargs)
