"""Decoding becomes slow after a long prompt, in Gemma 3n.

This is the same as in Gemma 4 (see ``one_token_attention``): attention of one query uses a small
part of the GPU.  Heads are smaller, so that less is lost.

The fix is the same, too.
"""

from __future__ import annotations

from .._families import GEMMA3N
from ._one_token import patch_of

PATCH = patch_of(
    GEMMA3N,
    name="gemma3n_one_token_attention",
    symptom="after a prompt of 32,000 tokens, Gemma 3n generates slowly",
    unreported="PyTorch's kernels do not split the keys of a single query with a mask.",
)
