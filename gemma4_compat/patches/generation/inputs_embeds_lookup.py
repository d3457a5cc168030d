"""Finding the token ids of ``inputs_embeds`` needs memory for tokens times vocabulary.

A model with per-layer embeddings (E2B, E4B) needs the token ids to look these up.  If it gets only
``inputs_embeds``, ``get_per_layer_inputs`` compares each input embedding with each row of the
embedding, all at once.  This needs batch x length x vocabulary x hidden size bytes: 1.7 TB for
1,652 tokens and 20 virtual ones.

Even if this fits, it does not work in bfloat16.  It multiplies the rows by ``hidden_size**0.5``.
The embedding multiplies them by that factor rounded to bfloat16 (39.25, not 39.19, in E2B).  No row
is equal to any embedding, and the error asks for exact embeddings.  Images, audio and padding cause
the same error: ``Gemma4Model`` puts the unscaled row of the pad token in their place.

The fix compares hashes of the embeddings of all tokens, one part of the vocabulary at a time, and
then the embeddings themselves.  It also accepts embeddings with upstream's own factor.  As before,
an embedding that belongs to no token raises an error, and so do two tokens that differ only in
their per-layer embeddings.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_of, mentions
from .._token_ids import token_ids

PATCH = Patch(
    name="inputs_embeds_lookup",
    symptom=(
        "inputs_embeds without input_ids on E2B or E4B: CUDA out of memory, Tried to allocate "
        "1690.50 GiB; or the inputs_embeds you provided do not exactly match the embedding weights"
    ),
    affects=("transformers",),
    links=(
        "https://github.com/huggingface/transformers/issues/45874",
        "https://github.com/huggingface/transformers/pull/45883",
        "https://github.com/huggingface/peft/issues/3201",
    ),
)

_MODELING = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def compares_all_rows_at_once() -> Finding:
    """Check whether the method still compares the rows."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

    searches = mentions(code_of(Gemma4TextModel.get_per_layer_inputs), "nonzero")
    reason = "Gemma4TextModel.get_per_layer_inputs no longer searches the embedding"
    return fixed_if(not searches, reason)


PATCH.copies(_MODELING, "Gemma4TextModel.get_per_layer_inputs", "4617bea09ff3 d7c8ea126d1a")


@PATCH.around(_MODELING, "Gemma4TextModel.get_per_layer_inputs")
def get_per_layer_inputs(
    original: Any, self: Any, input_ids: Any, *args: Any, **kwargs: Any
) -> Any:
    if input_ids is not None or not self.hidden_size_per_layer_input:
        return original(self, input_ids, *args, **kwargs)
    inputs_embeds = args[0] if args else kwargs["inputs_embeds"]
    return original(self, token_ids(self, inputs_embeds), inputs_embeds)
