"""An RMS norm of Gemma 4 has nine kernels, and a token has hundreds of norms.

transformers computes it in float32.  It converts, squares, averages, adds, takes the root,
multiplies twice and converts back, each in a kernel of its own.  E2B has 242 norms for each token.
So two thirds of the kernels of a decode step belong to norms, and the GPU waits for the CPU that
launches them.  For a long prompt the GPU reads and writes all hidden states nine times.

The fix computes a norm in one kernel if no gradients are needed, with the same bits: it adds in
PyTorch's order, and is compared with the original at the first call.  See
``runtime/kernels/rms_norm.py``.
"""

from __future__ import annotations

from .._families import GEMMA4
from ._norms import patch_of

PATCH = patch_of(
    GEMMA4,
    name="norm_kernels",
    symptom=(
        "generate is slow on a GPU: a token of E2B launches 3,400 kernels, 2,200 of them for norms"
    ),
)
