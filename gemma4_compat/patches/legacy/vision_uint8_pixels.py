"""A quantized vision tower truncates pixels to integers.

``Gemma4VisionPatchEmbedder.forward`` casts the pixels to the dtype of ``input_proj.weight``, which
is uint8 for a 4-bit weight and int8 for an 8-bit weight.  Pixels between -1 and 1 become -1 (or
255), 0 and 1, and the model describes gray shapes.  This looks like poor quantization, but the
image is lost.

The embedders of pixels and of sound in Gemma 4 unified do the same.

The fix casts pixels to the dtype of the position embeddings, as an unquantized model does.  The
inputs of ``Gemma4UnifiedMultimodalEmbedder`` keep their floating-point dtype.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at
from .._families import GEMMA4, UNIFIED
from ._claimed_dtype import claiming

PATCH = Patch(
    name="vision_uint8_pixels",
    symptom=(
        "a 4-bit or 8-bit model describes images wrongly, as gray shapes; a Gemma4Unified model "
        "ignores audio and images, or raises mixed dtype (CPU)"
    ),
    affects=("transformers<5.13", "bitsandbytes"),
    links=(
        "https://github.com/huggingface/transformers/issues/46932",
        "https://github.com/huggingface/transformers/pull/46933",
        "https://github.com/huggingface/transformers/issues/46899",
        "https://github.com/huggingface/transformers/pull/46904",
    ),
    former=("unified_uint8_inputs",),
)
_GEMMA4 = PATCH.part(GEMMA4.name)
_UNIFIED = PATCH.part(UNIFIED.name, UNIFIED.requirement)
_GONE = "inputs are no longer cast to an integer dtype"


@_GEMMA4.probe
def casts_to_any_dtype() -> Finding:
    """Check whether the forward casts only to floating-point dtypes."""
    return fixed_if(_asks(GEMMA4.module, "Gemma4VisionPatchEmbedder"), _GONE)


@_UNIFIED.probe
def unified_casts_to_any_dtype() -> Finding:
    """The same for Gemma 4 unified."""
    return fixed_if(_asks(UNIFIED.module, "Gemma4UnifiedVisionEmbedder"), _GONE)


def _asks(module: str, embedder: str) -> bool:
    return "is_floating_point" in code_at(module, f"{embedder}.forward").co_names


@_GEMMA4.around(GEMMA4.module, "Gemma4VisionPatchEmbedder.forward")
def patch_embedder_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    claimed = claiming(self, "input_proj", self.position_embedding_table.dtype)
    return original(claimed, *args, **kwargs)


@_UNIFIED.around(UNIFIED.module, "Gemma4UnifiedVisionEmbedder.forward")
def vision_embedder_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    claimed = claiming(self, "patch_dense", self.pos_embedding.dtype)
    return original(claimed, *args, **kwargs)


@_UNIFIED.around(UNIFIED.module, "Gemma4UnifiedMultimodalEmbedder.forward")
def multimodal_embedder_forward(
    original: Any, self: Any, inputs_embeds: Any, *args: Any, **kwargs: Any
) -> Any:
    claimed = claiming(self, "embedding_projection", inputs_embeds.dtype)
    return original(claimed, inputs_embeds, *args, **kwargs)
