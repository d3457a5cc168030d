"""Samples that are packed into one row attend to each other if a mask of ones is passed.

transformers recognizes packed samples by ``position_ids`` that restart inside a row.  It separates
them only if there is neither an ``attention_mask`` nor a cache when it makes the masks.  Most
collators pass a mask of ones, and ``Gemma4TextModel`` makes a cache unless ``use_cache`` is false.
Then each sample attends to those before it in its row, without an error.

This patch repairs nothing, as a mask of ones may be meant.  It looks at the first training steps
that pass ``position_ids``, warns once, and says how to separate the samples.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from ...engine import Finding, Kind, Patch, drifted, fixed_if
from ...model.caches import cache_name

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="packed_mask_notice",
    kind=Kind.WARNING,
    symptom=(
        "packed samples attend to each other, without an error: position_ids restart inside a row, "
        "but an attention_mask of ones is passed, or a cache is made"
    ),
    affects=("transformers",),
    links=(
        "https://github.com/hiyouga/LlamaFactory/issues/10736",
        "https://github.com/hiyouga/LlamaFactory/pull/10737",
    ),
)

_MODULE = "transformers.models.gemma4.modeling_gemma4"
#: the attentions for which transformers makes such a mask
_MASKED = ("eager", "sdpa", "flex_attention")
#: The number of training steps with position_ids that are looked at: each waits for the GPU.
LOOKS = 8
_looked: list[None] = []


@PATCH.probe
def a_mask_of_ones_joins_samples() -> Finding:
    """Make the mask of two packed samples of two tokens."""
    import torch
    from transformers.masking_utils import create_causal_mask

    mask = create_causal_mask(
        config=SimpleNamespace(_attn_implementation="eager"),
        inputs_embeds=torch.zeros(1, 4, 1, device="cpu"),
        attention_mask=torch.ones(1, 4, dtype=torch.long, device="cpu"),
        position_ids=torch.tensor([[0, 1, 0, 1]], device="cpu"),
        **{cache_name(): None},
    )
    if getattr(mask, "shape", None) != (1, 1, 4, 4):
        return drifted("create_causal_mask returns another mask")
    return fixed_if(mask[0, 0, 2, 0] < 0, "a mask of ones does not join packed samples")


@PATCH.around(_MODULE, "Gemma4Model.forward")
@PATCH.around(_MODULE, "Gemma4TextModel.forward")
def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    positions = kwargs.get("position_ids")
    if positions is not None and self.training and output[0].requires_grad:
        _look(self, output, positions, kwargs.get("attention_mask"))
    return output


def _look(model: Any, output: Any, positions: Any, mask: Any) -> None:
    import torch
    from transformers.utils.import_utils import is_tracing

    if is_tracing(positions) or torch._C._are_functorch_transforms_active():
        return
    if len(_looked) >= LOOKS or positions.is_meta:
        return
    if model.config.get_text_config()._attn_implementation not in _MASKED or positions.ndim != 2:
        return
    # The model of text and images makes its masks before it makes a cache.
    is_text = type(model.config) is type(model.config.get_text_config())
    if mask is None and (not is_text or getattr(output, cache_name(), None) is None):
        return
    restarts = positions[:, 1:] < positions[:, :-1]
    if mask is not None:
        if getattr(mask, "shape", (0, 0))[1:] != positions.shape[1:] or mask.is_meta:
            return
        # Where the mask changes, padding begins or ends, or the caller numbers the samples.
        same = (mask[:, 1:] == mask[:, :-1]) & (mask[:, 1:] != 0)
        restarts = restarts & same.to(restarts.device)
    _looked.append(None)
    if restarts.any():
        _warn()


@lru_cache
def _warn() -> None:
    logger.warning(
        "The samples that are packed into a row attend to each other: position_ids restart inside "
        "the row, but an attention_mask of ones is passed, or a cache is made.  transformers "
        "separates packed samples only without both.  Pass no attention_mask, and use_cache=False. "
        "With TRL, use SFTConfig(packing=True), which does so.  If your samples are meant to "
        "attend to each other, ignore this."
    )
