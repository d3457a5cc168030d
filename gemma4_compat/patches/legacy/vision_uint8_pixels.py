"""A quantized vision tower truncates pixels to integers.

``Gemma4VisionPatchEmbedder.forward`` casts the pixels to the dtype of ``input_proj.weight``, which
is uint8 for a 4-bit weight and int8 for an 8-bit weight.  Pixels between -1 and 1 become -1 (or
255), 0 and 1, and the model describes gray shapes.  This looks like poor quantization, but the
image is lost.

The fix casts to the dtype of the position embeddings, which is the dtype of an unquantized
``input_proj``.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from .._code import code_of
from ._claimed_dtype import claiming

PATCH = Patch(
    name="vision_uint8_pixels",
    symptom="a 4-bit or 8-bit model describes images wrongly, as gray shapes",
    affects=("transformers<5.13", "bitsandbytes"),
    changes="Pixels are cast to the vision tower's floating-point dtype, not to uint8 or int8.",
    links=(
        "https://github.com/huggingface/transformers/issues/46932",
        "https://github.com/huggingface/transformers/pull/46933",
    ),
)

_MODULE = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def casts_to_any_dtype() -> Finding:
    """Check whether the forward casts only to floating-point dtypes."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionPatchEmbedder

    asks = "is_floating_point" in code_of(Gemma4VisionPatchEmbedder.forward).co_names
    return fixed_if(asks, "pixels are no longer cast to an integer dtype")


@PATCH.around(_MODULE, "Gemma4VisionPatchEmbedder.forward")
def patch_embedder_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    claimed = claiming(self, "input_proj", self.position_embedding_table.dtype)
    return original(claimed, *args, **kwargs)
