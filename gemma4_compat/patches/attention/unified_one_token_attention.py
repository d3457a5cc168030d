"""Decoding becomes slow after a long prompt, in Gemma 4 unified.

This is the same as in Gemma 4 (see ``one_token_attention``): attention of one query uses a small
part of the GPU.

The fix is the same, too.
"""

from __future__ import annotations

from .._families import UNIFIED
from ._one_token import patch_of

PATCH = patch_of(
    UNIFIED,
    name="unified_one_token_attention",
    symptom="after a prompt of 32,000 tokens, Gemma 4 unified generates slowly",
    unreported="PyTorch has no kernel for one query of heads of 512 that splits the keys.",
)
