"""In a long prompt, a sliding layer of Gemma 4 unified computes the scores of all keys.

This is the same as in Gemma 4 (see ``sliding_prompt_attention``).

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._sliding import mend

PATCH = Patch(
    name="unified_sliding_prompt_attention",
    kind=Kind.SPEED,
    symptom=(
        "Gemma 4 unified needs long for a prompt of 8,000 tokens, although most layers see only "
        "1,024"
    ),
    affects=("transformers>=5.10",),
    changes=(
        "On a GPU, sliding layers of Gemma 4 unified compute a prompt of 4,096 tokens or more in "
        "parts, each with the keys of its windows, if attn_implementation is sdpa.  The result "
        "differs by rounding."
    ),
    unreported="PyTorch's scaled_dot_product_attention has no argument for a window.",
)

mend(
    PATCH,
    "transformers.models.gemma4_unified.modeling_gemma4_unified",
    "Gemma4UnifiedTextAttention",
)
