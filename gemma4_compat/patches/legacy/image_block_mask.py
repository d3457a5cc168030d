"""Image tokens attend to each other in full-attention layers, and beyond the sliding window.

In 12B, 26B-A4B and 31B the tokens of one image attend to each other in both directions, but only in
sliding layers and within the window.  Full-attention layers are causal.  transformers 5.9 to 5.12
make the masks with Gemma 3's function, which makes images bidirectional in every layer.  In these
and earlier releases the block of an image is added after the window, so a token also attends to
tokens of its image before the window if an image has more tokens than the window.  There is no
error, but the logits differ.

The fix makes the mask of full attention without images, and adds to the mask of the sliding layers
only those tokens of an image that are in the window, as transformers does since 5.13.  torch before
2.6 accepts no additional mask functions; there, the mask of sliding layers stays as it is.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._image_blocks import block_ids, within_block_and_window

PATCH = Patch(
    name="image_block_mask",
    symptom=(
        "12B, 26B-A4B and 31B give other logits for images than transformers 5.13 does, without an "
        "error: image tokens attend to each other in full-attention layers, and beyond the window"
    ),
    affects=("transformers<5.13",),
    links=(
        "https://github.com/huggingface/transformers/issues/46711",
        "https://github.com/huggingface/transformers/pull/46850",
    ),
)

_MODELS = ("gemma4_text", "gemma4_unified_text")


@PATCH.probe
def masks_are_made_as_for_gemma_3() -> Finding:
    """Check which function makes the masks; some releases import the model later."""
    from transformers import masking_utils

    model = sys.modules.get("transformers.models.gemma4.modeling_gemma4")
    if hasattr(model, "create_masks_for_vision_model"):
        return fixed("Gemma 4 has its own function for masks, apart from Gemma 3")
    make = inspect.unwrap(masking_utils.create_masks_for_generate)
    if "block_sequence_ids" in inspect.signature(make).parameters:
        return broken()
    if hasattr(model, "create_causal_mask_mapping"):
        return broken()
    return drifted("neither known function makes the masks of images")


@PATCH.around(
    "transformers.models.gemma4.modeling_gemma4",
    "create_causal_mask_mapping",
    when="transformers<5.9",
)
def create_causal_mask_mapping(
    original: Any,
    config: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    past_key_values: Any,
    position_ids: Any,
    mm_token_type_ids: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = (config, inputs_embeds, attention_mask, past_key_values, position_ids)
    masks = original(*given, mm_token_type_ids, *args, **kwargs)
    if mm_token_type_ids is None or inputs_embeds.shape[1] == 1:
        return masks
    blocks = block_ids(mm_token_type_ids.to(inputs_embeds.device))
    sliding = _sliding_mask(config.get_text_config(), *given[1:], blocks)
    return {**masks, "sliding_attention": sliding}


@PATCH.around("transformers.masking_utils", "create_masks_for_generate", when="transformers>=5.9")
def create_masks_for_generate(
    original: Any,
    config: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    past_key_values: Any,
    position_ids: Any = None,
    or_mask_function: Any = None,
    and_mask_function: Any = None,
    block_sequence_ids: Any = None,
    **kwargs: Any,
) -> Any:
    given = (inputs_embeds, attention_mask, past_key_values, position_ids)
    functions = (or_mask_function, and_mask_function)
    text = config.get_text_config()
    if block_sequence_ids is None or functions != (None, None) or not _has_blocks(text):
        return original(config, *given, *functions, block_sequence_ids, **kwargs)
    causal = original(config, *given, **kwargs)
    if inputs_embeds.shape[1] == 1:
        return causal  # a single new token has no later tokens to attend to
    sliding = _sliding_mask(text, *given, block_sequence_ids)
    if isinstance(causal, dict):
        return {**causal, **({"sliding_attention": sliding} if _slides(text) else {})}
    return sliding if _slides(text) else causal  # all layers are of one type


def _has_blocks(config: Any) -> bool:
    if getattr(config, "use_bidirectional_attention", None) != "vision":
        return False
    return config.model_type in _MODELS


def _slides(config: Any) -> bool:
    return "sliding_attention" in config.layer_types


def _sliding_mask(
    config: Any, inputs_embeds: Any, padding: Any, cache: Any, position_ids: Any, blocks: Any
) -> Any:
    from transformers.masking_utils import create_sliding_window_causal_mask

    return create_sliding_window_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=padding,
        past_key_values=cache,
        position_ids=position_ids,
        or_mask_function=within_block_and_window(blocks, config.sliding_window),
    )
