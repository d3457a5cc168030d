"""Decoding becomes slow after a long prompt, because attention uses a small part of the GPU.

In a decode step there is one query per head.  PyTorch's kernels give the keys of a head to one
block each, or to a few: on an H100, 8 of 132 processors compute the attention of a full layer of
E2B.  Reading 32,768 keys and values then takes 3 ms, where the memory needs 0.02.  The kernels also
read the free part of a static cache.

The fix computes such attention with a kernel of its own, see
``runtime/kernels/one_token_attention.py``.  Scores, weights and sums are float32.  PyTorch's
kernels round the weights to bfloat16 or float16, so that the logits differ by rounding.  The same
kernel computes at most 8 tokens of one sequence with a mask, such as a check of drafts.  Prompts,
gradients, torch.compile and other implementations than ``sdpa`` stay as they are.
"""

from __future__ import annotations

from typing import Any

from ...engine import Kind, Patch
from ...runtime.capture.decoding import forget
from ...runtime.kernels import one_token_attention
from ...runtime.kernels.replacing import FEW_TOKENS
from .._families import FAMILIES, former
from ._sdpa import are_known, replace

PATCH = Patch(
    name="one_token_attention",
    kind=Kind.FAST,
    symptom="after a prompt of 32,000 tokens, Gemma 4 generates at a quarter of the speed",
    affects=(),
    note="Compute capabilities other than 9.0 were not measured.",
    unreported="PyTorch has no kernel for one query of heads of 512 that splits the keys.",
    former=former("one_token_attention"),
)


PATCH.copies(
    "transformers.integrations.sdpa_attention",
    "sdpa_attention_forward",
    "cd1f40bc6516 3d71a183830f 5bad813857a1 23311cee538c 388c98d1bd3f cb7fe4dd2e04 "
    "0f71c4b23095 14a5742d6d7f",
)


def _has_few_tokens(layer: Any, hidden_states: Any) -> bool:
    batch, tokens = hidden_states.shape[:2]
    return bool(tokens == 1 or (batch == 1 and tokens <= FEW_TOKENS))


def _attention(
    sdpa: Any, layer: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> Any:
    tokens = query.shape[2]
    # without a mask, each token has other keys
    same_keys = tokens == 1 or (mask is not None and mask.ndim == 4)
    if same_keys and are_known(options):
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        inputs = query, key, value, mask
        if tokens > 1:  # each as a sequence of its own, with the same keys
            inputs = _as_sequences(tokens, *inputs)
        output = one_token_attention.attention(*inputs, scale)
        if output is not None:
            return output.view(query.shape[0], tokens, *output.shape[2:]), None
    return sdpa(layer, query, key, value, mask, **options)


def _as_sequences(tokens: int, query: Any, key: Any, value: Any, mask: Any) -> tuple[Any, ...]:
    keys = key.expand(tokens, -1, -1, -1), value.expand(tokens, -1, -1, -1)
    return query.transpose(0, 2), *keys, mask.transpose(0, 2)


for family in FAMILIES:
    replace(PATCH.part(family.name, family.requirement), family, _has_few_tokens, _attention)
PATCH.on_revert(forget)
