"""In a long prompt, a sliding layer computes the scores of all keys, and uses those of its window.

PyTorch's attention does not know that a mask is that of a window.  With 8,192 tokens and a window
of 512, fifteen of sixteen scores are computed for nothing.  In E2B this is a quarter of the time of
the prompt, and more in longer prompts.

The fix gives PyTorch a part of the queries at a time, with those keys that the mask leaves to them.
It reads the ranges of keys from the mask, so that any mask is right, such as those of images and of
padded batches.  The result differs by rounding, because PyTorch adds fewer zeros.  Gradients,
torch.compile, short prompts and other implementations than ``sdpa`` stay as they are.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._sliding import mend

PATCH = Patch(
    name="sliding_prompt_attention",
    kind=Kind.SPEED,
    symptom="Gemma 4 needs long for a prompt of 8,000 tokens, although most layers see only 512",
    affects=("transformers",),
    changes=(
        "On a GPU, sliding layers of Gemma 4 compute a prompt of 4,096 tokens or more in parts, "
        "each with the keys of its windows, if attn_implementation is sdpa.  The result differs "
        "by rounding."
    ),
    unreported="PyTorch's scaled_dot_product_attention has no argument for a window.",
)

mend(PATCH, "transformers.models.gemma4.modeling_gemma4", "Gemma4TextAttention")
