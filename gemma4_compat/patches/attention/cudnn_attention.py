"""cuDNN's attention gives NaN gradients on H100 and H200.

PyTorch prefers cuDNN's attention there since 2.11.  With an explicit mask, and if the number of
keys is 64 modulo 128, its backward scores the missing half of the last 128 keys as 0 instead of
-inf.  Where all scores of a query are low, ``exp(0 - logsumexp)`` overflows, and the gradient of
the query is NaN.  Gemma 4 does not scale its scores, so they can be low.  Its masks are explicit if
a batch is padded, has images, or is longer than the sliding window.

The fix computes such attention without cuDNN if a gradient is needed, and only if cuDNN is wrong on
this GPU: a small example decides, once.  On GPUs of compute capability 10, cuDNN also decodes wrong
values.  PyTorch's own fix does not use cuDNN for a single query there, and neither does this one.
"""

from __future__ import annotations

from .._families import GEMMA4
from ._cudnn import patch_of

PATCH = patch_of(
    GEMMA4,
    name="cudnn_attention",
    symptom="grad_norm is nan on an H100 or H200, if the length of a batch is 64 modulo 128",
    note=(
        "The bug is in PyTorch 2.11 and later, with the cuDNN that it brings.  Compute capability "
        "10 (B200) was not measured."
    ),
    links=(
        "https://github.com/pytorch/pytorch/issues/196678",
        "https://github.com/pytorch/pytorch/issues/193893",
        "https://github.com/NVIDIA-NeMo/Automodel/issues/2208",
    ),
)
