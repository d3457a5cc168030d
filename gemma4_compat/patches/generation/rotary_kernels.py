"""The rotary embedding of Gemma 4 has five kernels, and runs twice in each layer.

For queries and for keys of each layer, transformers multiplies twice, negates, concatenates and
adds, each in a kernel of its own.  These are 250 kernels and 200 views for each token of E2B, and
the GPU waits for the CPU that launches them.

The fix does the same in one kernel if no gradients are needed, with the same bits.  See
``runtime/kernels/rotary.py``.
"""

from __future__ import annotations

from .._families import GEMMA4
from ._rotary import patch_of

PATCH = patch_of(
    GEMMA4,
    name="rotary_kernels",
    symptom="generate is slow on a GPU: rotary embeddings of E2B launch 250 kernels for a token",
)
