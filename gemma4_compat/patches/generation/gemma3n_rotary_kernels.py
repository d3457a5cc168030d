"""The rotary embedding of Gemma 3n has five kernels, and runs twice in each layer.

This is the same as in Gemma 4 (see ``rotary_kernels``).

The fix is the same, too.
"""

from __future__ import annotations

from .._families import GEMMA3N
from ._rotary import patch_of

PATCH = patch_of(
    GEMMA3N,
    name="gemma3n_rotary_kernels",
    symptom="Gemma 3n: generate is slow on a GPU, because rotary embeddings launch many kernels",
)
