"""A quantised vision tower sees its images truncated to integers.

``Gemma4VisionPatchEmbedder.forward`` casts the pixels to the dtype of ``input_proj.weight``.  That
of a 4-bit weight is uint8, of an 8-bit weight int8: pixels between -1 and 1 become -1 (or 255), 0
and 1, and the model describes grey shapes.  What looks like poor quantisation is a lost image.

The fix casts to the dtype that ``input_proj`` has where it is not quantised: that of the position
embeddings beside it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from .._claimed_dtype import claiming, is_float

PATCH = Patch(
    name="vision_uint8_pixels",
    symptom="the vision of a 4-bit or 8-bit model is blind: grey shapes, wrong descriptions",
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
    """Look whether the cast is guarded."""
    import inspect

    from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionPatchEmbedder

    forward = inspect.unwrap(Gemma4VisionPatchEmbedder.forward)
    if "is_floating_point" in forward.__code__.co_names:
        return fixed("pixels are no longer cast to an integer dtype")
    return broken()


@PATCH.replaces(_MODULE, "Gemma4VisionPatchEmbedder.forward")
def patch_embedder_forward(original: Any) -> Any:
    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_float(self.input_proj):
            self = claiming(self, "input_proj", self.position_embedding_table.dtype)
        return original(self, *args, **kwargs)

    return forward
