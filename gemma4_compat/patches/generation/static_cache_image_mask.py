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

import sys
from inspect import signature
from typing import Any

from ...engine import Finding, Part, Patch, broken, fixed
from ...model.caches import cache_name, layers_by_kind
from .._families import GEMMA4, UNIFIED, Family, former
from .._image_blocks import has_bidirectional_images

PATCH = Patch(
    name="static_cache_image_mask",
    symptom=(
        "12B, 26B-A4B and 31B give other logits for images, without an error, with "
        'cache_implementation="static" than with a dynamic cache'
    ),
    affects=(),
    note="Chunked prefill, and images after cached tokens, are not fixed in 5.24.0.",
    unreported="Reported only in another project (unsloth #10903).",
    former=former("static_cache_image_mask", UNIFIED),
)


def mend(part: Part, family: Family) -> None:
    """Register the probe and the replacement for a family's class with images."""
    model = f"{family.prefix}ForConditionalGeneration"
    part.around(family.module, f"{model}.prepare_inputs_for_generation")(_with_image_mask)

    @part.probe
    def mask_is_made_without_the_token_types() -> Finding:
        """Run the installed method on a tiny static cache."""
        return _probe(getattr(sys.modules[family.module], model))


def _probe(model_class: Any) -> Finding:
    """Prepare two new tokens after two cached ones, and check the token types of the mask."""
    import torch
    from transformers.cache_utils import PreTrainedConfig, StaticCache

    class Model(model_class):  # type: ignore[misc]
        config = PreTrainedConfig(num_hidden_layers=1, layer_types=["full_attention"])
        dtype = torch.float32
        device = torch.device("cpu")

        def __init__(self) -> None:
            pass  # the method under test needs no modules

        @staticmethod
        def create_masks_for_generate(mm_token_type_ids: Any = None, **kwargs: Any) -> Any:
            return {"made from": mm_token_type_ids}

    model = Model()
    all_tokens = torch.ones((1, 4), dtype=torch.long, device="cpu")
    inputs = model.prepare_inputs_for_generation(
        all_tokens[:, 2:],
        attention_mask=all_tokens,
        mm_token_type_ids=all_tokens,
        is_first_iteration=True,
        **{cache_name(): StaticCache(config=model.config, max_cache_len=4)},
    )
    types = inputs["attention_mask"]["made from"]
    if types is not None and types.shape == all_tokens.shape:
        return fixed("the mask is made from the token types of the whole sequence")
    return broken()


def _with_image_mask(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``prepare_inputs_for_generation`` with the mask rebuilt from the returned token types."""
    import torch
    from transformers.cache_utils import Cache

    inputs = original(self, *args, **kwargs)
    types = inputs.get("mm_token_type_ids")
    if types is None or not isinstance(inputs.get("attention_mask"), dict):
        return inputs
    bound = signature(original).bind(self, *args, **kwargs).arguments
    given = {**bound, **bound.get("kwargs", {})}
    padding = given.get("attention_mask")
    is_masked_by_caller = isinstance(padding, dict) or getattr(padding, "ndim", 2) != 2
    if is_masked_by_caller or not has_bidirectional_images(self.config, types):
        return inputs
    tokens = inputs.get("inputs_embeds")
    tokens = inputs["input_ids"] if tokens is None else tokens
    masks = {}
    # transformers 5.13 to 5.16 size the mask of sliding layers by a full layer, so each mask
    # is made with a cache that has layers of one kind only.
    for name, layers in layers_by_kind(inputs[cache_name()]).items():
        masks[name] = self.create_masks_for_generate(
            config=self.config,
            # create_masks_for_generate reads only its shape, dtype and device
            inputs_embeds=torch.empty(
                (*tokens.shape[:2], 0), dtype=self.dtype, device=tokens.device
            ),
            attention_mask=padding,
            position_ids=inputs.get("position_ids"),
            mm_token_type_ids=types.to(tokens.device),
            is_first_iteration=given.get("is_first_iteration", False),
            **{cache_name(): Cache(layers=layers)},
        )[name]
    inputs["attention_mask"] = {**inputs["attention_mask"], **masks}
    return inputs


for each in (GEMMA4, UNIFIED):
    mend(PATCH.part(each.name, each.requirement), each)
