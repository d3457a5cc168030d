"""PyTorch's attention kernel misreads keys and values that are a view of a single head.

E2B has one KV head.  ``repeat_kv`` gives each query head a view of it, whose stride over the heads
is zero.  CUDA's memory-efficient kernel has a special case for a single query of such heads.
Without gradients, it applies this case also to the last of many queries, if that one is alone in
its block.  This happens if the number of queries is 1 modulo 32, or 64 for small heads.  Then the
result for this query is wrong.  The kernel runs in full layers, and in sliding layers with an
explicit mask, which they have if the batch is padded or the prompt is longer than the window.  So a
prompt of 545 tokens is wrong even without padding, and so is a second turn of 65 tokens.

The fix copies such keys and values, which the kernel reads correctly.  It applies only to numbers
of queries of 1 modulo 32, and only if the kernel is wrong on this GPU: a small example decides.
``repeat_kv`` does not know the number of queries.  The attention layers of Gemma say it.  In other
models, and after a graph break of torch.compile inside a layer, the number of keys counts: it is
the same in a prompt without cached tokens.
"""

from __future__ import annotations

import sys
import threading
from functools import lru_cache, wraps
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_of, mentions
from ...runtime.capture.cudnn import allowed_kernels
from .._families import FAMILIES

PATCH = Patch(
    name="single_head_attention",
    symptom=(
        "E2B on a GPU generates garbage for a padded batch, for a prompt longer than the sliding "
        "window, or after a second turn, if its length is 1 modulo 32"
    ),
    affects=("transformers",),
    note="The bug is in PyTorch.  It was measured with 2.11.",
    links=(
        "https://github.com/pytorch/pytorch/issues/191937",
        "https://github.com/huggingface/transformers/issues/47651",
    ),
)

_MODULE = "transformers.integrations.sdpa_attention"
#: The kernel computes the queries in blocks of this number, or of twice or four times this number.
_BLOCK = 32


class _Layer:
    """The attention layer that runs; its number of queries is 0 if it is not known."""

    def __init__(self) -> None:
        self.queries = 0


class _OfThread(_Layer, threading.local):
    """That of this thread; torch.compile cannot trace it."""


_thread, _traced = _OfThread(), _Layer()


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
        if not (hidden_states.is_cuda and heads == 1 and n_rep > 1):
            return repeated
        queries = _layer().queries or length
        is_alone = queries != 1 and 1 in (queries % _BLOCK, length % _BLOCK)
        return repeated.contiguous() if is_alone and _is_misread(hidden_states) else repeated

    return repeat_kv


def _layer() -> Any:
    import torch

    return _traced if torch.compiler.is_compiling() else _thread


def _forward(original: Any, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention layer."""
    layer = _layer()
    outer, layer.queries = layer.queries, hidden_states.shape[1]
    try:
        return original(self, hidden_states, *args, **kwargs)
    finally:
        layer.queries = outer


def _is_misread(keys: Any) -> bool:
    import torch

    # The example cannot run in a graph.  A copy is right in any case.
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return True
    return _differs(keys.device, keys.dtype, keys.shape[-1], *allowed_kernels())


@lru_cache
def _differs(device: Any, dtype: Any, head_size: int, *_: Any) -> bool:
    """Whether a view and a copy of the same keys give different attention on this GPU."""
    import torch

    length = 4 * _BLOCK + 1
    keys = torch.arange(length * head_size, device=device).sin().to(dtype)
    view = keys.view(1, 1, length, head_size).expand(1, 2, length, head_size)
    copy = view.contiguous()
    mask = torch.ones(length, length, device=device, dtype=torch.bool).tril()
    attention = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        viewed = attention(copy, view, view, attn_mask=mask)
        return not torch.equal(viewed, attention(copy, copy, copy, attn_mask=mask))


for family in FAMILIES:
    part = PATCH.part(family.name, family.requirement)
    part.around(family.module, f"{family.prefix}TextAttention.forward")(_forward)
