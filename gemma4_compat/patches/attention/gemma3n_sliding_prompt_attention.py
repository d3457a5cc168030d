"""In a long prompt, a sliding layer of Gemma 3n computes the scores of all keys.

This is the same as in Gemma 4 (see ``sliding_prompt_attention``).

The fix is the same, too.
"""

from __future__ import annotations

from .._families import GEMMA3N
from ._sliding import patch_of

PATCH = patch_of(
    GEMMA3N,
    name="gemma3n_sliding_prompt_attention",
    symptom="Gemma 3n needs long for a prompt of 8,000 tokens, although most layers see only 512",
)
