"""In a long prompt, a sliding layer of Gemma 3n computes the scores of all keys.

This is the same as in Gemma 4 (see ``sliding_prompt_attention``).

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._sliding import mend

PATCH = Patch(
    name="gemma3n_sliding_prompt_attention",
    kind=Kind.SPEED,
    symptom="Gemma 3n needs long for a prompt of 8,000 tokens, although most layers see only 512",
    affects=("transformers",),
    changes=(
        "On a GPU, sliding layers of Gemma 3n compute a prompt of 4,096 tokens or more in parts, "
        "each with the keys of its windows, if attn_implementation is sdpa.  The result differs "
        "by rounding."
    ),
    unreported="PyTorch's scaled_dot_product_attention has no argument for a window.",
)

mend(PATCH, "transformers.models.gemma3n.modeling_gemma3n", "Gemma3nTextAttention")
