"""An RMS norm of Gemma 4 unified has nine kernels, and a token has hundreds of norms.

This is the same as in Gemma 4 (see ``norm_kernels``).

The fix is the same, too.
"""

from __future__ import annotations

from .._families import UNIFIED
from ._norms import patch_of

PATCH = patch_of(
    UNIFIED,
    name="unified_norm_kernels",
    symptom="Gemma 4 unified: generate is slow on a GPU, because each norm launches nine kernels",
)
