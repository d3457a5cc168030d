"""Offloaded embeddings cannot be resized, or tied again.

``resize_token_embeddings`` makes a larger or smaller weight, and copies the old rows into it.  The
weight of offloaded embeddings is on meta, so no row is copied, and the new weight is on meta, too.
accelerate's hook still has the old weight, and the next forward fails, because the shapes differ.

``tie_weights``, which ends a resize and may be called at any time, makes the weight of the head the
one of the embeddings.  If these are offloaded, the head is on meta, and no hook loads it.

The fix loads offloaded embeddings, and an offloaded head, while they are resized or tied.  Their
hooks load the new weights from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._offload import offload, onload, onloaded

PATCH = Patch(
    name="offloaded_resize_embeddings",
    symptom=(
        "resize_token_embeddings with embed_tokens or lm_head offloaded, then a forward: Trying to "
        'set a tensor of shape ... in "weight" (which has shape ...), this looks incorrect'
    ),
    affects=("transformers", "accelerate"),
    changes=(
        "resize_token_embeddings and tie_weights load offloaded embeddings while they run, and the "
        "accelerate hooks of resized embeddings get the new weights."
    ),
    unreported=("Only a report about another model is known upstream (transformers #30048)."),
)


@PATCH.probe
def resize_ignores_offloading() -> Finding:
    """Look whether the resize still hands the hook on as it is."""
    import inspect

    from transformers.modeling_utils import PreTrainedModel

    code = getattr(inspect.unwrap(PreTrainedModel._resize_token_embeddings), "__code__", None)
    if code is None:
        return drifted("PreTrainedModel._resize_token_embeddings is not a plain function")
    if "weights_map" in code.co_names:
        return fixed("resize_token_embeddings changes what the hook loads")
    return broken()


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel.resize_token_embeddings")
def resize_token_embeddings(original: Any) -> Any:
    """Both ends stay loaded until they are tied again."""

    @wraps(original)
    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _onloaded_ends(self, keep_changes=True):
            return original(self, *args, **kwargs)

    return resize_token_embeddings


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel.tie_weights")
def tie_weights(original: Any) -> Any:
    @wraps(original)
    def tie_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _onloaded_ends(self):
            return original(self, *args, **kwargs)

    return tie_weights


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._get_resized_embeddings")
def get_resized_embeddings(original: Any) -> Any:
    """Per-layer embeddings are resized by this alone."""

    @wraps(original)
    def _get_resized_embeddings(self: Any, old_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        with onloaded(old_embeddings, keep_changes=True):
            return original(self, old_embeddings, *args, **kwargs)

    return _get_resized_embeddings


@contextmanager
def _onloaded_ends(model: Any, *, keep_changes: bool = False) -> Iterator[None]:
    """Have input and output embeddings loaded; others may be in their place after the block."""
    loaded = []
    for end in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            module = end()
        except (AttributeError, NotImplementedError):  # a model without token embeddings
            continue
        hook = None if module is None else onload(module)
        if hook is not None:
            loaded.append((end, hook))
    completed = False
    try:
        yield
        completed = True
    finally:
        for end, hook in loaded:
            offload(end(), hook, keep_changes=keep_changes and completed)
