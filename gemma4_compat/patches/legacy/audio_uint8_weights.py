"""A quantized audio tower raises an error, because it reads the dtype of its weights.

The feed-forward and convolution modules take their clamp bounds from ``torch.finfo`` of a weight's
dtype, and the attention casts its output to a weight's dtype.  The dtype of a quantized weight is
uint8 (4-bit) or int8 (8-bit): ``finfo`` raises, and the cast would truncate the activations.

The fix uses the dtype of the activations, which is the dtype of unquantized weights.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_of
from ._claimed_dtype import claiming

PATCH = Patch(
    name="audio_uint8_weights",
    symptom="torch.finfo() requires a floating point input type, in the 4-bit or 8-bit audio tower",
    affects=("transformers<5.11", "bitsandbytes"),
    links=("https://github.com/huggingface/transformers/issues/45672",),
)

_MODULE = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def bounds_of_a_weight() -> Finding:
    """Check whether the clamp bounds come from a weight."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioFeedForward

    reads = "weight" in code_of(Gemma4AudioFeedForward.forward).co_names
    return fixed_if(not reads, "clamp bounds no longer come from a weight's dtype")


def _following_activations(layer: str) -> Any:
    """A forward that uses the activations' dtype where it reads ``layer.weight.dtype``."""

    def forward(original: Any, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        following = claiming(self, layer, hidden_states.dtype)
        return original(following, hidden_states, *args, **kwargs)

    return forward


for _name, _layer in (
    ("FeedForward", "ffw_layer_1.linear"),
    ("LightConv1d", "linear_start.linear"),
    ("Attention", "post.linear"),
):
    PATCH.around(_MODULE, f"Gemma4Audio{_name}.forward")(_following_activations(_layer))
