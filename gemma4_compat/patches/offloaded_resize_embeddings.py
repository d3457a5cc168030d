"""Offloaded embeddings cannot be resized.

``resize_token_embeddings`` makes a larger or smaller weight, and copies the old rows into it.  The
weight of offloaded embeddings is on meta, so no row is copied, and the new weight is on meta, too.
accelerate's hook still has the old weight, and the next forward fails, because the shapes differ.

The fix loads offloaded embeddings, and an offloaded head, while they are resized.  Their hooks load
the new weights from then on.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ..engine import Finding, Patch, broken, drifted, fixed
from ._offload import offload, onload, onloaded

PATCH = Patch(
    name="offloaded_resize_embeddings",
    symptom=(
        "resize_token_embeddings with embed_tokens or lm_head offloaded, then a forward: Trying to "
        'set a tensor of shape ... in "weight" (which has shape ...), this looks incorrect'
    ),
    affects=(("transformers>=5.5", "accelerate>=1.10"),),
    changes=(
        "resize_token_embeddings loads offloaded embeddings while it resizes them, and gives the "
        "new weights to their accelerate hooks."
    ),
    ends="not fixed upstream as of transformers 5.23.0",
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
        ends = (self.get_input_embeddings, self.get_output_embeddings)
        loaded = [(end, onload(end())) for end in ends if end() is not None]
        resized = False
        try:
            result = original(self, *args, **kwargs)
            resized = True
        finally:
            for end, hook in loaded:
                if hook is not None:
                    offload(end(), hook, keep_changes=resized)  # a new head has the old one's hook
        return result

    return resize_token_embeddings


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._get_resized_embeddings")
def get_resized_embeddings(original: Any) -> Any:
    """Per-layer embeddings are resized by this alone."""

    @wraps(original)
    def _get_resized_embeddings(self: Any, old_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        with onloaded(old_embeddings, keep_changes=True):
            return original(self, old_embeddings, *args, **kwargs)

    return _get_resized_embeddings
