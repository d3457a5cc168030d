"""Without a cache there is no sharing of keys and values.

In transformers 5.5.0 and 5.5.1 the layers that are to reuse the keys and values of earlier layers
find them on the cache object.  With ``use_cache=False`` there is none, and gradient checkpointing
hides it from every layer.  Each layer then falls back to its own key and value projections, which
the model was not trained to use: no error, other logits, a loss far too high.

The fix gives each forward a holder that is handed from layer to layer beside the cache.  A layer
without a cache uses it in its place.  It keeps what is shared, for the length of the forward, and
nothing else; no cache is returned that was not asked for.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed

PATCH = Patch(
    name="kv_sharing_without_cache",
    symptom=(
        "garbage with use_cache=False, and a far too high training loss with gradient "
        "checkpointing, without an error"
    ),
    affects=("transformers<5.5.2",),
    changes=(
        "Gemma4TextModel.forward hands the decoder layers an object that holds the shared keys "
        "and values; Gemma4TextAttention uses it where it has no cache."
    ),
    links=(
        "https://github.com/huggingface/transformers/issues/45242",
        "https://github.com/huggingface/transformers/pull/45312",
    ),
)

_MODEL = "transformers.models.gemma4.modeling_gemma4"
_ARGUMENT = "shared_without_cache"


@PATCH.probe
def shared_keys_are_on_the_cache() -> Finding:
    """Look where the attention finds shared keys and values."""
    import inspect

    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention

    code = getattr(inspect.unwrap(Gemma4TextAttention.forward), "__code__", None)
    if code is None:
        return drifted("Gemma4TextAttention.forward is not a plain function")
    if "shared_kv_states" in code.co_varnames:
        return fixed("shared keys and values are handed from layer to layer")
    if "shared_layers" in code.co_names:
        return broken()
    return drifted("Gemma4TextAttention.forward finds shared keys and values elsewhere")


@PATCH.replaces(_MODEL, "Gemma4TextModel.forward")
def text_model_forward(original: Any) -> Any:
    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **{_ARGUMENT: _SharedKeysAndValues()}, **kwargs)

    return forward


@PATCH.replaces(_MODEL, "Gemma4TextAttention.forward")
def text_attention_forward(original: Any) -> Any:
    @wraps(original)
    def forward(
        self: Any,
        hidden_states: Any,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        shared = kwargs.pop(_ARGUMENT, None)
        if past_key_values is None:
            past_key_values = shared
        return original(
            self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )

    return forward


class _SharedKeysAndValues:
    """As much of a cache as the attention needs; no Mapping, which accelerate would rebuild."""

    def __init__(self) -> None:
        self.shared_layers: dict[int, Any] = {}

    def update(self, keys: Any, values: Any, layer_index: int) -> tuple[Any, Any]:
        return keys, values
