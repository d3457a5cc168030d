"""The rotary embedding of Gemma 4 unified has five kernels, and runs twice in each layer.

This is the same as in Gemma 4 (see ``rotary_kernels``).

The fix is the same, too.
"""

from __future__ import annotations

from .._families import UNIFIED
from ._rotary import patch_of

PATCH = patch_of(
    UNIFIED,
    name="unified_rotary_kernels",
    symptom="Gemma 4 unified: generate is slow on a GPU: rotary embeddings launch many kernels",
)
