"""An RMS norm of Gemma 3n has nine kernels, and a token has hundreds of norms.

This is the same as in Gemma 4 (see ``norm_kernels``).

The fix is the same, too.
"""

from __future__ import annotations

from .._families import GEMMA3N
from ._norms import patch_of

PATCH = patch_of(
    GEMMA3N,
    name="gemma3n_norm_kernels",
    symptom="Gemma 3n: generate is slow on a GPU, because each norm launches nine kernels",
)
