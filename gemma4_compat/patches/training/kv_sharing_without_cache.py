"""Without a cache, layers do not share keys and values.

In transformers 5.5.0 and 5.5.1, layers that reuse the keys and values of earlier layers read them
from the cache object.  With ``use_cache=False`` there is no cache, and gradient checkpointing hides
it from every layer.  Each layer then uses its own key and value projections, which the model was
not trained to use.  There is no error, but the logits differ and the loss is far too high.

The fix passes an additional object to all layers of a forward.  A layer without a cache uses this
object instead.  It stores only the shared keys and values, and only during the forward; the model
still returns no cache unless the caller requests one.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._code import code_at

PATCH = Patch(
    name="kv_sharing_without_cache",
    symptom=(
        "garbage with use_cache=False, and a far too high training loss with gradient "
        "checkpointing, without an error"
    ),
    affects=("transformers<5.5.2",),
    changes=(
        "Gemma4TextModel.forward passes the decoder layers an object that holds the shared keys "
        "and values; Gemma4TextAttention uses it if there is no cache."
    ),
    links=(
        "https://github.com/huggingface/transformers/issues/45242",
        "https://github.com/huggingface/transformers/pull/45312",
        "https://github.com/NVIDIA-NeMo/Automodel/issues/1705",
        "https://github.com/unslothai/unsloth-zoo/pull/813",
    ),
)

_MODEL = "transformers.models.gemma4.modeling_gemma4"
_ARGUMENT = "shared_without_cache"


@PATCH.probe
def shared_keys_are_on_the_cache() -> Finding:
    """Check where the attention reads shared keys and values."""
    code = code_at("transformers.models.gemma4.modeling_gemma4", "Gemma4TextAttention.forward")
    if "shared_kv_states" in code.co_varnames:
        return fixed("shared keys and values are passed from layer to layer")
    if "shared_layers" in code.co_names:
        return broken()
    return drifted("Gemma4TextAttention.forward does not read shared keys and values as expected")


@PATCH.around(_MODEL, "Gemma4TextModel.forward")
def text_model_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(self, *args, **{_ARGUMENT: _SharedKeysAndValues()}, **kwargs)


@PATCH.around(_MODEL, "Gemma4TextAttention.forward")
def text_attention_forward(
    original: Any,
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


class _SharedKeysAndValues:
    """The part of a cache that the attention needs.

    It is not a Mapping, because accelerate would rebuild one.
    """

    def __init__(self) -> None:
        self.shared_layers: dict[int, Any] = {}

    def update(self, keys: Any, values: Any, layer_index: int) -> tuple[Any, Any]:
        return keys, values
