"""Prompt tuning and P-tuning have no per-layer embeddings for their virtual tokens.

PEFT puts the embeddings of virtual tokens in front of those of the text, and calls the base model
with only ``inputs_embeds``.  A model with per-layer embeddings (E2B, E4B) then searches its
embedding for the token ids.  A virtual token is not in the vocabulary, so the search raises an
error, unless it runs out of memory before.

The fix gives virtual tokens the per-layer embeddings of the pad token.  Gemma 4 uses these for all
embeddings that do not belong to a token: those of images, video and audio.  The virtual tokens of
CPT are initialized from tokens of the vocabulary, and get the per-layer embeddings of these tokens.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from ...engine.probing import code_of, mentions
from .._token_ids import VIRTUAL, token_ids, virtual_tokens

PATCH = Patch(
    name="prompt_tuning_embeddings",
    symptom=(
        "prompt tuning, P-tuning, CPT on E2B or E4B: CUDA out of memory, Tried to allocate "
        "1690.50 GiB; or the inputs_embeds you provided do not exactly match the embedding weights"
    ),
    affects=("transformers", "peft"),
    links=(
        "https://github.com/huggingface/peft/issues/3201",
        "https://github.com/huggingface/transformers/issues/45874",
    ),
)

_MODELING = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def embeddings_are_searched() -> Finding:
    """Check whether PEFT passes per-layer embeddings, and whether the model searches for ids."""
    from peft.peft_model import PeftModelForCausalLM
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

    forward = code_of(PeftModelForCausalLM.forward)
    search = code_of(Gemma4TextModel.get_per_layer_inputs)
    if mentions(forward, "per_layer_inputs"):
        return fixed("PEFT passes per-layer embeddings itself")
    if not mentions(search, "nonzero"):
        return drifted("Gemma4TextModel.get_per_layer_inputs no longer searches the embedding")
    return broken()


@PATCH.around("peft.peft_model", "PeftModelForCausalLM.forward")
@PATCH.around("peft.peft_model", "PeftModelForCausalLM.generate")
@PATCH.around("peft.peft_model", "PeftModelForFeatureExtraction.forward")
def with_virtual_tokens(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not self.active_peft_config.is_prompt_learning:
        return original(self, *args, **kwargs)
    token = VIRTUAL.set(_virtual_tokens(self))
    try:
        return original(self, *args, **kwargs)
    finally:
        VIRTUAL.reset(token)


@PATCH.around(_MODELING, "Gemma4TextModel.get_per_layer_inputs")
def get_per_layer_inputs(
    original: Any, self: Any, input_ids: Any, *args: Any, **kwargs: Any
) -> Any:
    if input_ids is None and virtual_tokens(self):
        input_ids = token_ids(self, args[0] if args else kwargs["inputs_embeds"])
    return original(self, input_ids, *args, **kwargs)


def _virtual_tokens(peft_model: Any) -> tuple[Any, list[int]] | None:
    """The text model with the per-layer embeddings, and a token id for each virtual token."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

    models = (m for m in peft_model.get_base_model().modules() if isinstance(m, Gemma4TextModel))
    model = next(models, None)
    if model is None:
        return None
    config = peft_model.active_peft_config
    pad = model.config.pad_token_id or 0
    return model, list(getattr(config, "cpt_token_ids", None) or [pad] * config.num_virtual_tokens)
