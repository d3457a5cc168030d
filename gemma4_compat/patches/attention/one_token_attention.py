"""Decoding becomes slow after a long prompt, because attention uses a small part of the GPU.

In a decode step there is one query per head.  PyTorch's kernels give the keys of a head to one
block each, or to a few: on an H100, 8 of 132 processors compute the attention of a full layer of
E2B.  Reading 32,768 keys and values then takes 3 ms, where the memory needs 0.02.  The kernels also
read the free part of a static cache.

The fix computes such attention with a kernel of its own, see
``runtime/kernels/one_token_attention.py``.  Scores, weights and sums are float32.  PyTorch's
kernels round the weights to bfloat16 or float16, so that the logits differ by rounding.  Prompts,
gradients, torch.compile and other implementations than ``sdpa`` stay as they are.
"""

from __future__ import annotations

from .._families import GEMMA4
from ._one_token import patch_of

PATCH = patch_of(
    GEMMA4,
    name="one_token_attention",
    symptom="after a prompt of 32,000 tokens, Gemma 4 generates at a quarter of the speed",
    unreported="PyTorch has no kernel for one query of heads of 512 that splits the keys.",
)
