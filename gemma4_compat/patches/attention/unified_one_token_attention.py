"""Decoding becomes slow after a long prompt, in Gemma 4 unified.

This is the same as in Gemma 4 (see ``one_token_attention``): attention of one query uses a small
part of the GPU.

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._one_token import mend

PATCH = Patch(
    name="unified_one_token_attention",
    kind=Kind.SPEED,
    symptom="after a prompt of 32,000 tokens, Gemma 4 unified generates slowly",
    affects=("transformers>=5.10",),
    changes=(
        "On a GPU, the attention of Gemma 4 unified in decode steps is computed in a kernel of "
        "this package if attn_implementation is sdpa.  The result differs by rounding."
    ),
    note="Compute capabilities other than 9.0 were not measured.",
    unreported="PyTorch has no kernel for one query of heads of 512 that splits the keys.",
)

mend(
    PATCH,
    "transformers.models.gemma4_unified.modeling_gemma4_unified",
    "Gemma4UnifiedTextAttention",
)
