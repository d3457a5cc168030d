"""With a static cache, image tokens attend causally.

In 12B, 26B-A4B and 31B the tokens of an image attend to each other in both directions, with a mask
made from ``mm_token_type_ids``.  With a static cache, ``generate`` makes the mask itself, in
``prepare_inputs_for_generation``, before it adds the token types to the model's inputs.  The mask
is therefore causal, and the model uses it unchanged.  There is no error, but the logits differ from
those with a dynamic cache.

transformers 5.23.0 passes the token types, but only those of the current forward, while the mask
reads them by position in the whole sequence.  So images are still masked wrongly in chunked
prefill, and after cached tokens.

The fix makes the mask again from the token types that the model gets.  Forwards without image
tokens, such as decode steps, are unchanged.
"""

from __future__ import annotations

from .._families import GEMMA4
from ._image_mask import patch_of

PATCH = patch_of(
    GEMMA4,
    name="static_cache_image_mask",
    symptom=(
        "12B, 26B-A4B and 31B give other logits for images, without an error, with "
        'cache_implementation="static" than with a dynamic cache'
    ),
)
