"""In a long prompt, a sliding layer of Gemma 4 unified computes the scores of all keys.

This is the same as in Gemma 4 (see ``sliding_prompt_attention``).

The fix is the same, too.
"""

from __future__ import annotations

from .._families import UNIFIED
from ._sliding import patch_of

PATCH = patch_of(
    UNIFIED,
    name="unified_sliding_prompt_attention",
    symptom=(
        "Gemma 4 unified needs long for a prompt of 8,000 tokens, although most layers see only "
        "1,024"
    ),
)
