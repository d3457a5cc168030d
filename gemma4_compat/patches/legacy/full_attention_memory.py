"""Attention of a long prompt needs memory that grows with the square of its length.

The full-attention layers of Gemma 4 have heads of 512.  transformers passes grouped keys to
PyTorch's ``scaled_dot_product_attention`` if no mask is needed.  For grouped keys, only the kernels
for heads up to 256 are efficient.  For larger ones PyTorch computes all scores: 1.5 GiB in E2B for
4,096 tokens, and four times that for twice the length.

The fix repeats the keys instead, as transformers does since 5.13.  The memory-efficient kernel then
computes the attention: 96 MiB for 4,096 tokens, and in a sixth of the time.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_of

PATCH = Patch(
    name="full_attention_memory",
    kind=Kind.MEMORY,
    symptom="torch.OutOfMemoryError in scaled_dot_product_attention for a prompt of 8,000 tokens",
    affects=("transformers<5.13",),
    links=("https://github.com/huggingface/transformers/issues/46960",),
    differs="prompts round as the kernel of transformers 5.13 does, which needs less memory",
)

_MODULE = "transformers.integrations.sdpa_attention"
#: the largest head size of the efficient kernels for grouped keys
_LARGEST_HEAD = 256


@PATCH.probe
def head_size_is_not_asked() -> Finding:
    """Check whether transformers considers the head size."""
    code = code_of(sys.modules[_MODULE].use_gqa_in_sdpa)
    return fixed_if(_LARGEST_HEAD in code.co_consts, "transformers passes no large heads in groups")


@PATCH.replaces(_MODULE, "use_gqa_in_sdpa")
def few_calls(original: Any) -> Any:
    """All models call it, in each layer."""

    @wraps(original)
    def use_gqa_in_sdpa(attention_mask: Any, key: Any) -> bool:
        # On meta the same code estimates the memory of a GPU.
        if key.shape[-1] > _LARGEST_HEAD and key.device.type in ("cuda", "meta"):
            return False
        return bool(original(attention_mask, key))

    return use_gqa_in_sdpa
