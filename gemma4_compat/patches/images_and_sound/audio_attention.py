"""``attn_implementation="sdpa"`` fails, because the audio tower does not support it.

Since transformers 5.20.0 ``Gemma4AudioModel`` declares, correctly, that it supports eager attention
only.  transformers passes an explicit ``attn_implementation="sdpa"`` on to every sub-model, and a
sub-model without support raises.  So a setting that is right for the language model stops the load.

The fix lets only the audio tower fall back to eager attention.  The patch must not apply to older
releases, in which the tower inverts its mask under eager attention.
"""

from __future__ import annotations

import logging
from typing import Any

from ...engine import Finding, Patch, fixed_if

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="audio_attention",
    symptom=(
        "Gemma4AudioModel does not support an attention implementation through "
        "torch.nn.functional.scaled_dot_product_attention yet"
    ),
    affects=("transformers>=5.20",),
    unreported=("Found by the tests of this package; no report is known upstream."),
)

_TOWER = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def tower_refuses_sdpa() -> Finding:
    """Check whether the tower declares support for sdpa."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioModel

    return fixed_if(Gemma4AudioModel._supports_sdpa, "the audio tower supports sdpa")


@PATCH.around(_TOWER, "Gemma4AudioModel._check_and_adjust_attn_implementation")
def check_and_adjust_attn_implementation(
    original: Any, self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any
) -> Any:
    """transformers calls this method when it builds the model."""
    return original(self, _or_eager(self, attn_implementation), *args, **kwargs)


@PATCH.around(_TOWER, "Gemma4AudioModel.get_correct_attn_implementation")
def get_correct_attn_implementation(
    original: Any, self: Any, requested_attention: str | None, *args: Any, **kwargs: Any
) -> Any:
    """``set_attn_implementation`` of the whole model calls this method."""
    return original(self, _or_eager(self, requested_attention), *args, **kwargs)


def _or_eager(model: Any, requested: str | None) -> str | None:
    supports = {
        "flash": model._supports_flash_attn,
        "flex": model._supports_flex_attn,
        "sdpa": model._supports_sdpa,
    }
    kind = next((each for each in supports if each in (requested or "")), None)
    if kind is None or supports[kind]:
        return requested
    logger.info("the audio tower does not support %s attention, so it uses eager", requested)
    return "eager"
