"""Each forward of a QAT checkpoint in Google's own format dequantizes all token embeddings.

With per-layer embeddings, ``Gemma4Model.forward`` reads the embedding of the pad token as
``embed_tokens.weight[pad_token_id, :]``.  The ``weight`` of transformers' ``QuantizedEmbedding`` is
a property, which dequantizes the whole table and gives one row of it.  With the sizes of E2B, that
takes 4.1 GiB in each forward, also in that of one token.  With ``embed_tokens`` offloaded, the
table is on meta, and the forward fails.

The fix gives the model this one row: the module dequantizes it alone, from where it is stored.
"""

from __future__ import annotations

import sys
from typing import Any

from ...engine import Patch
from ...model.hooks import offload_hook
from ._pad_embedding import FORWARD, weight_is_read_outside_its_module, with_weight

PATCH = Patch(
    name="packed_pad_embedding",
    symptom=(
        "each forward of a QAT checkpoint (mobile) of E2B needs 4 GiB more memory than its "
        "weights, and is slow; with embed_tokens offloaded: Tensor on device meta is not on the "
        "expected device"
    ),
    affects=("transformers>=5.11",),
    unreported="Found by a plan of a QAT checkpoint: activations needed more than the weights.",
)

_TABLES = ("embedding_quantized", "embedding_scale")


PATCH.probe(weight_is_read_outside_its_module)


@PATCH.around(*FORWARD)
def model_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    embedding = self.language_model.embed_tokens
    is_packed = _TABLES[0] in embedding._parameters and _is_usual(type(embedding))
    if is_packed and not torch.compiler.is_compiling():
        self = with_weight(self, _Rows(embedding))
    return original(self, *args, **kwargs)


def _is_usual(cls: Any) -> bool:
    """Whether a class has the ``weight`` of transformers, not one of a user."""
    module = sys.modules.get("transformers.integrations.gemma_quant")
    usual = getattr(module, "QuantizedEmbedding", None)
    return usual is not None and getattr(cls, "weight", None) is usual.weight


class _Rows:
    """The weight of a ``QuantizedEmbedding`` that dequantizes only the indexed rows."""

    def __init__(self, embedding: Any) -> None:
        self.embedding = embedding

    def __getitem__(self, index: Any) -> Any:
        hook = offload_hook(self.embedding)
        tables = [getattr(self.embedding, name)[index] for name in _TABLES]
        if hook is not None and tables[0].is_meta:
            stored = (hook.weights_map[name][index] for name in _TABLES)
            tables = [rows.to(hook.execution_device) for rows in stored]
        return self.embedding._dequantize_weights(*tables)
