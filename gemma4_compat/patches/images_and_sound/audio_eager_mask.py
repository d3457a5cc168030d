"""With eager attention, the audio tower attends to exactly the positions that its mask forbids.

The tower has its own attention function, which needs a boolean mask: true means allowed.  For eager
attention transformers makes an additive mask: 0 means allowed, the lowest value of the dtype means
forbidden.  The tower negates this mask as if it were boolean, which inverts it: each position
attends to padding and to positions outside its window.  There is no error, but the outputs differ
from those of sdpa, whose masks are boolean.

The fix makes the mask boolean before the tower uses it.  The outputs then equal those of sdpa bit
for bit.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from ...engine.probing import code_of

PATCH = Patch(
    name="audio_eager_mask",
    symptom=(
        'attn_implementation="eager" gives other outputs for sound than sdpa, and wrong ones, '
        "without an error"
    ),
    affects=("transformers<5.20",),
    links=(
        "https://github.com/huggingface/transformers/issues/48818",
        "https://github.com/huggingface/transformers/pull/48922",
    ),
)

_MODEL = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def tower_negates_its_mask() -> Finding:
    """Check whether the tower's attention negates its mask."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioAttention, Gemma4AudioModel

    if "logical_not" not in code_of(Gemma4AudioAttention.forward).co_names:
        return fixed("the audio tower's attention does not negate its mask")
    if "finfo" in code_of(Gemma4AudioModel._convert_4d_mask_to_blocked_5d).co_names:
        return drifted("the audio tower's masks are no longer filled with False")
    return broken()


@PATCH.around(_MODEL, "Gemma4AudioModel._convert_4d_mask_to_blocked_5d")
def convert_4d_mask_to_blocked_5d(original: Any, self: Any, mask_4d: Any) -> Any:
    return original(self, mask_4d == 0 if mask_4d.is_floating_point() else mask_4d)
