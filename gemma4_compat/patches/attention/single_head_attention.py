"""PyTorch's attention kernel misreads keys and values that are a view of a single head.

E2B has one KV head.  ``repeat_kv`` gives each query head a view of it, whose stride over the heads
is zero.  With an explicit mask, CUDA's memory-efficient kernel then returns wrong values if the
number of keys is 1 modulo 32.  A mask is explicit if the batch is padded, and in sliding layers if
the prompt is longer than the window.  So a prompt of 545 tokens is wrong even without padding.

The fix copies such keys and values, which the kernel reads correctly.  It applies only to lengths
of 1 modulo 32, and only if the kernel is wrong on this GPU: a small example decides, once.
"""

from __future__ import annotations

import sys
from functools import lru_cache, wraps
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_of, mentions

PATCH = Patch(
    name="single_head_attention",
    symptom=(
        "E2B on a GPU generates garbage for a padded batch, or for a prompt longer than the "
        "sliding window, if the length is 1 modulo 32"
    ),
    affects=("transformers",),
    changes=(
        "On a GPU whose attention kernel is wrong, keys and values of a single KV head are copied "
        "for each query head if their length is 1 modulo 32."
    ),
    note="The bug is in PyTorch.  It was measured with 2.11.",
    links=(
        "https://github.com/pytorch/pytorch/issues/191937",
        "https://github.com/huggingface/transformers/issues/47651",
    ),
)

_MODULE = "transformers.integrations.sdpa_attention"
#: The kernel reads keys in blocks of this number, and misreads a last block of one key.
_BLOCK = 32


@PATCH.probe
def keys_are_views() -> Finding:
    """Check whether transformers copies the keys itself.  PyTorch is examined at the first call."""
    code = code_of(sys.modules[_MODULE].repeat_kv)
    return fixed_if(mentions(code, "contiguous"), "transformers copies the keys itself")


@PATCH.replaces(_MODULE, "repeat_kv")
def few_calls(original: Any) -> Any:
    """The ``sdpa_attention_forward`` of all models calls it for keys and for values."""

    @wraps(original)
    def repeat_kv(hidden_states: Any, n_rep: int) -> Any:
        repeated = original(hidden_states, n_rep)
        _, heads, length, _ = hidden_states.shape
        single = hidden_states.is_cuda and heads == 1 and n_rep > 1
        if single and length % _BLOCK == 1 and _is_misread(hidden_states):
            return repeated.contiguous()
        return repeated

    return repeat_kv


def _is_misread(keys: Any) -> bool:
    import torch

    # The example cannot run in a graph.  A copy is right in any case.
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return True
    return _differs(keys.device, keys.dtype, keys.shape[-1])


@lru_cache
def _differs(device: Any, dtype: Any, head_size: int) -> bool:
    """Whether a view and a copy of the same keys give different attention on this GPU."""
    import torch

    length = _BLOCK + 1
    keys = torch.arange(length * head_size, device=device).sin().to(dtype)
    view = keys.view(1, 1, length, head_size).expand(1, 2, length, head_size)
    copy = view.contiguous()
    mask = torch.ones(length, length, device=device, dtype=torch.bool).tril()
    attention = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        viewed = attention(copy, view, view, attn_mask=mask)
        return not torch.equal(viewed, attention(copy, copy, copy, attn_mask=mask))
