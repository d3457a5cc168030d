"""The masks of images after cached tokens have one length in all layers.

The cache of a sliding layer keeps the tokens of the window, that of a full-attention layer keeps
all.  In 12B, 26B-A4B and 31B, whose image tokens attend to each other, transformers 5.14 to 5.16
give the mask of the sliding layers the length of the full ones.  A prompt with an image after
cached tokens, such as the second turn of a chat, raises as soon as the window is full.

The fix makes each mask with a cache that has layers of its kind only.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from ...engine.probing import code_at
from ...model.caches import layers_by_kind

PATCH = Patch(
    name="image_mask_length",
    symptom=(
        "12B, 26B-A4B and 31B with an image after cached tokens: The size of tensor a must match "
        "the size of tensor b at non-singleton dimension 3"
    ),
    affects=("transformers>=5.14,<5.17",),
    links=("https://github.com/huggingface/transformers/pull/48482",),
)

_MODULE = "transformers.models.gemma4.modeling_gemma4"
_MASKS = "create_masks_for_vision_model"


@PATCH.probe
def sliding_mask_is_as_long_as_that_of_full_layers() -> Finding:
    """Check which layer gives the mask of the sliding layers its length."""
    code = code_at(_MODULE, _MASKS)
    if "sliding_layer_idx" in code.co_varnames:
        return fixed("the mask has the length of a sliding layer")
    if "sliding_window_overlay" not in code.co_names:
        return drifted(f"{_MASKS} makes no mask of a window")
    return broken()


@PATCH.around(_MODULE, _MASKS)
def create_masks_for_vision_model(
    original: Any,
    config: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    past_key_values: Any,
    position_ids: Any,
    block_sequence_ids: Any,
) -> Any:
    from transformers.cache_utils import Cache

    def masks(cache: Any) -> Any:
        given = (inputs_embeds, attention_mask, cache, position_ids, block_sequence_ids)
        return original(config, *given)

    kinds = layers_by_kind(past_key_values) if hasattr(past_key_values, "layers") else {}
    if len(kinds) < 2:
        return masks(past_key_values)
    return {name: masks(Cache(layers=layers))[name] for name, layers in kinds.items()}
