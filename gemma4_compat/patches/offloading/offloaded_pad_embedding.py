"""A model with per-layer embeddings cannot run with its token embeddings offloaded.

``Gemma4Model.forward`` reads the embedding of the pad token from ``embed_tokens.weight`` directly,
outside the module's forward, when an offloaded weight is on meta.  So ``cpu_offload`` and
``disk_offload`` of a whole model fail, and so does a device map ("auto" included) that offloads
``embed_tokens``.

The fix gives the model this one row, read from where the weight is stored.
"""

from __future__ import annotations

from typing import Any

from ...engine import Patch
from ...model.hooks import offload_hook
from ...runtime.host.onloading import hook_of_weight
from ._pad_embedding import FORWARD, weight_is_read_outside_its_module, with_weight

PATCH = Patch(
    name="offloaded_pad_embedding",
    symptom="Tensor on device meta is not on the expected device, with embed_tokens offloaded",
    affects=("transformers", "accelerate"),
    links=("https://github.com/huggingface/transformers/pull/48409",),
)


PATCH.probe(weight_is_read_outside_its_module)


@PATCH.around(*FORWARD)
def model_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    embedding = self.language_model.embed_tokens
    if any(offload_hook(module) is not None for module in embedding.modules()):
        # The lookup of the token ids leaves the weight on meta, if it was not there before.
        hook = hook_of_weight(embedding)
        self = with_weight(self, embedding.weight if hook is None else _Rows(hook))
    return original(self, *args, **kwargs)


class _Rows:
    """An offloaded weight that copies only the indexed rows to the execution device."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __getitem__(self, index: Any) -> Any:
        return self.hook.weights_map["weight"][index].to(self.hook.execution_device)
