"""Under a static cache image tokens attend causally.

In 12B, 26B-A4B and 31B the tokens of an image attend to each other in both directions.  The mask
for that is made from ``mm_token_type_ids``.  With a static cache ``generate`` makes the mask
itself, in ``prepare_inputs_for_generation``, before it has put the token types among the inputs of
the model: the mask comes out causal, and the model takes a finished mask as it is.  No error, but
other logits than with a dynamic cache.

Since transformers 5.23.0 the types are there, but cut to the tokens of the current forward, while
the mask looks them up by position in the whole sequence.  So images are still masked wrongly in
chunked prefill, and after what is in the cache already.

The fix makes the mask again from the token types that the model gets.  Only a forward with image
tokens in it has any; those that decode a token have none.
"""

from __future__ import annotations

from ...engine import Finding, Patch
from .._image_mask import probe, with_image_mask

PATCH = Patch(
    name="static_cache_image_mask",
    symptom=(
        "12B, 26B-A4B and 31B see images differently, without an error, with "
        'cache_implementation="static" than with a dynamic cache'
    ),
    affects=("transformers",),
    changes=(
        "prepare_inputs_for_generation of Gemma 4 makes the mask of a static cache from all token "
        "types, where there are images."
    ),
    note="Chunked prefill, and images after cached tokens, are not fixed in 5.23.0.",
    unreported="Reported only in another project (unsloth #10903).",
)

_MODEL = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def mask_is_made_without_the_token_types() -> Finding:
    """Ask the installed method."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4ForConditionalGeneration

    return probe(Gemma4ForConditionalGeneration)


PATCH.replaces(_MODEL, "Gemma4ForConditionalGeneration.prepare_inputs_for_generation")(
    with_image_mask
)
