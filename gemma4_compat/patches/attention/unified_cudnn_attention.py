"""cuDNN's attention gives NaN gradients on H100 and H200, in Gemma 4 unified.

This is the same as in Gemma 4 (see ``cudnn_attention``): a mask, and 64 keys modulo 128.

The fix is the same, too.
"""

from __future__ import annotations

from .._families import UNIFIED
from ._cudnn import patch_of

PATCH = patch_of(
    UNIFIED,
    name="unified_cudnn_attention",
    symptom=(
        "Gemma 4 unified: grad_norm is nan on an H100 or H200, if the length of a batch is 64 "
        "modulo 128"
    ),
    note="The bug is in PyTorch 2.11 and later.  Compute capability 10 (B200) was not measured.",
    links=("https://github.com/pytorch/pytorch/issues/196678",),
)
