"""Training on text raises an error without ``mm_token_type_ids``.

Models that attend to images in both directions (``use_bidirectional_attention="vision"``, the large
models) need the types of all tokens in training, and raise an error without them.  transformers 5.5
raises it also for batches without images, which every text data set and text collator makes.

Without images, all token types are zero.  The fix passes these zeros.  A batch with pixels is
refused as before, because the patch cannot know which of its tokens are images.
"""

from __future__ import annotations

import inspect
from typing import Any

from ...engine import Finding, Patch, fixed_if

PATCH = Patch(
    name="mm_token_type_ids",
    symptom="`mm_token_type_ids` is required as a model input when training",
    affects=("transformers<5.6",),
    changes=(
        "In training, Gemma4Model.forward uses zeros for missing mm_token_type_ids when a batch "
        "has no pixels."
    ),
    links=(
        "https://github.com/huggingface/transformers/issues/45200",
        "https://github.com/huggingface/transformers/pull/45454",
    ),
)

_MODEL = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def masks_ask_for_token_types() -> Finding:
    """Check whether the function that makes the masks depends on training."""
    from transformers.models.gemma4 import modeling_gemma4

    masks = getattr(modeling_gemma4, "create_causal_mask_mapping", None)
    asks = masks is not None and "is_training" in inspect.signature(masks).parameters
    return fixed_if(not asks, "masks are made without token types")


@PATCH.around(_MODEL, "Gemma4Model.forward")
def model_forward(
    original: Any,
    self: Any,
    input_ids: Any = None,
    pixel_values: Any = None,
    pixel_values_videos: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    import torch

    no_pixels = pixel_values is None and pixel_values_videos is None
    by_image = self.config.get_text_config().use_bidirectional_attention == "vision"
    if self.training and no_pixels and by_image and not args:
        tokens = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        if tokens is not None and kwargs.get("mm_token_type_ids") is None:
            kwargs["mm_token_type_ids"] = torch.zeros(
                tokens.shape[:2], dtype=torch.long, device=tokens.device
            )
    return original(self, input_ids, pixel_values, pixel_values_videos, *args, **kwargs)
