"""With a static cache, the image tokens of Gemma 4 unified attend causally.

This is the same bug as in Gemma 4 (see ``static_cache_image_mask``): ``generate`` makes the mask
without the token types, or only from those of the current forward.

The fix makes the mask again from the token types that the model gets.
"""

from __future__ import annotations

from ...engine import Patch
from ._image_mask import mend

PATCH = Patch(
    name="unified_static_cache_image_mask",
    symptom=(
        "Gemma 4 unified gives other logits for images, without an error, with "
        'cache_implementation="static" than with a dynamic cache'
    ),
    affects=("transformers>=5.10",),
    changes=(
        "prepare_inputs_for_generation of Gemma 4 unified makes the mask of a static cache from "
        "all token types, if there are images."
    ),
    note="Chunked prefill, and images after cached tokens, are not fixed in 5.24.0.",
    unreported="Reported only in another project (unsloth #10903).",
)

mend(
    PATCH,
    "transformers.models.gemma4_unified.modeling_gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration",
)
