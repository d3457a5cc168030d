"""In a long prompt, a sliding layer computes the scores of all keys, and uses those of its window.

PyTorch's attention does not know that a mask is that of a window.  With 8,192 tokens and a window
of 512, fifteen of sixteen scores are computed for nothing.  In E2B this is a quarter of the time of
the prompt, and more in longer prompts.

The fix gives PyTorch a part of the queries at a time, with those keys that the mask leaves to them.
It reads the ranges of keys from the mask, so that any mask is right, such as those of images and of
chunks.  PyTorch adds fewer zeros: in bfloat16 and float16, the result has the same bits, and the
first prompt shows whether this GPU computes so.  Gradients, torch.compile, float32, short prompts,
prompts with padding and other implementations than ``sdpa`` stay as they are.
"""

from __future__ import annotations

from .._families import GEMMA4
from ._sliding import patch_of

PATCH = patch_of(
    GEMMA4,
    name="sliding_prompt_attention",
    symptom="Gemma 4 needs long for a prompt of 8,000 tokens, although most layers see only 512",
)
