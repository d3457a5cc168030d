"""cuDNN's attention gives NaN gradients on H100 and H200, in Gemma 3n.

This is the same as in Gemma 4 (see ``cudnn_attention``): a mask, and 64 keys modulo 128.

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Patch
from ._cudnn import mend

PATCH = Patch(
    name="gemma3n_cudnn_attention",
    symptom=(
        "Gemma 3n: grad_norm is nan on an H100 or H200, if the length of a batch is 64 modulo 128"
    ),
    affects=("transformers",),
    changes=(
        "Attention of Gemma 3n does not use cuDNN on a GPU where it is wrong: for gradients with a "
        "mask, if the number of keys is 64 modulo 128; for single queries on compute capability 10."
    ),
    note="The bug is in PyTorch 2.11 and later.  Compute capability 10 (B200) was not measured.",
    links=("https://github.com/pytorch/pytorch/issues/196678",),
)

mend(PATCH, "transformers.models.gemma3n.modeling_gemma3n", "Gemma3nTextAttention")
