"""Offloaded embeddings cannot be resized, or tied again.

``resize_token_embeddings`` makes a larger or smaller weight, and copies the old rows to it.  The
weight of offloaded embeddings is on meta, so no row is copied, and the new weight is on meta, too.
accelerate's hook still has the old weight, and the next forward fails, because the shapes differ.

``tie_weights``, which a resize calls at its end and users may call at any time, makes the head use
the weight of the embeddings.  If the embeddings are offloaded, the weight of the head is then on
meta, and no hook loads it.

The fix onloads offloaded embeddings, and an offloaded head, while they are resized or tied.  From
then on their hooks load the new weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from .._code import code_at
from .._offload import offload, onload, onloaded

PATCH = Patch(
    name="offloaded_resize_embeddings",
    symptom=(
        "resize_token_embeddings with embed_tokens or lm_head offloaded, then a forward: Trying to "
        'set a tensor of shape ... in "weight" (which has shape ...), this looks incorrect'
    ),
    affects=("transformers", "accelerate"),
    changes=(
        "resize_token_embeddings and tie_weights onload offloaded embeddings while they run, and "
        "the accelerate hooks of resized embeddings get the new weights."
    ),
    links=("https://github.com/huggingface/transformers/issues/30048",),
)


@PATCH.probe
def resize_ignores_offloading() -> Finding:
    """Look whether the resize still leaves the hook as it is."""
    code = code_at("transformers.modeling_utils", "PreTrainedModel._resize_token_embeddings")
    if "weights_map" in code.co_names:
        return fixed("resize_token_embeddings changes what the hook loads")
    return broken()


@PATCH.around("transformers.modeling_utils", "PreTrainedModel.resize_token_embeddings")
def resize_token_embeddings(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Embeddings and head stay onloaded until they are tied again."""
    with _onloaded_embeddings(self, keep_changes=True):
        return original(self, *args, **kwargs)


@PATCH.around("transformers.modeling_utils", "PreTrainedModel.tie_weights")
def tie_weights(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with _onloaded_embeddings(self):
        return original(self, *args, **kwargs)


@PATCH.around("transformers.modeling_utils", "PreTrainedModel._get_resized_embeddings")
def get_resized_embeddings(
    original: Any, self: Any, old_embeddings: Any, *args: Any, **kwargs: Any
) -> Any:
    """Only this method resizes the per-layer embeddings."""
    with onloaded(old_embeddings, keep_changes=True):
        return original(self, old_embeddings, *args, **kwargs)


@contextmanager
def _onloaded_embeddings(model: Any, *, keep_changes: bool = False) -> Iterator[None]:
    """Onload the input and output embeddings.  The block may replace them by other modules."""
    loaded = []
    for get_embeddings in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            module = get_embeddings()
        except (AttributeError, NotImplementedError):  # a model without token embeddings
            continue
        hook = None if module is None else onload(module)
        if hook is not None:
            loaded.append((get_embeddings, hook))
    completed = False
    try:
        yield
        completed = True
    finally:
        for get_embeddings, hook in loaded:
            offload(get_embeddings(), hook, keep_changes=keep_changes and completed)
