"""Decoding becomes slow after a long prompt, in Gemma 3n.

This is the same as in Gemma 4 (see ``one_token_attention``): attention of one query uses a small
part of the GPU.  Heads are smaller, so that less is lost.

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._one_token import mend

PATCH = Patch(
    name="gemma3n_one_token_attention",
    kind=Kind.SPEED,
    symptom="after a prompt of 32,000 tokens, Gemma 3n generates slowly",
    affects=("transformers",),
    changes=(
        "On a GPU, the attention of Gemma 3n in decode steps is computed in a kernel of this "
        "package if attn_implementation is sdpa.  The result differs by rounding."
    ),
    note="Compute capabilities other than 9.0 were not measured.",
    unreported="PyTorch's kernels do not split the keys of a single query with a mask.",
)

mend(PATCH, "transformers.models.gemma3n.modeling_gemma3n", "Gemma3nTextAttention")
