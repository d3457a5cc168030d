"""With a static cache, the image tokens of Gemma 4 unified attend causally.

This is the same bug as in Gemma 4 (see ``static_cache_image_mask``): ``generate`` makes the mask
without the token types, or only from those of the current forward.

The fix makes the mask again from the token types that the model gets.
"""

from __future__ import annotations

from .._families import UNIFIED
from ._image_mask import patch_of

PATCH = patch_of(
    UNIFIED,
    name="unified_static_cache_image_mask",
    symptom=(
        "Gemma 4 unified gives other logits for images, without an error, with "
        'cache_implementation="static" than with a dynamic cache'
    ),
)
