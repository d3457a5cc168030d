"""Under float16 autocast, the audio tower uses bounds and a mask constant beyond float16.

The audio layers clamp hidden states to 1e10, or to the largest value of a dtype if that is smaller.
It is the dtype of a weight, or of the layer's input.  Under autocast the clamped tensor is the
output of a linear layer, so it is float16 whatever dtype these have.  Behind it, the attention
scores are the result of a matrix product.  They are float16, too, and their mask constant is -1e9.
PyTorch converts neither 1e10 nor -1e9 to float16.

The fix limits both to the range of float16 wherever float16 is at work.  The softmax of a score of
-65504 is exactly 0, as that of -1e9 is: the other scores are between -50 and 50.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...objects import View
from .._code import code_at

PATCH = Patch(
    name="audio_float16",
    symptom=(
        "sound with Trainer(fp16=True) or float16 autocast (T4, V100): value cannot be converted "
        "to type c10::Half without overflow"
    ),
    affects=("transformers",),
    changes=(
        "Under float16 autocast, and for hidden states in float16, the clamp bounds and the mask "
        "constant of Gemma 4's audio layers are at most 65504.  Masked positions stay masked."
    ),
    unreported="Only unsloth-zoo's own code mentions it; no report is known upstream.",
)

_MODULE = "transformers.models.gemma4.modeling_gemma4"
_MASK = "attention_invalid_logits_value"


@PATCH.probe
def constants_beyond_float16() -> Finding:
    """Look for a bound from a weight's dtype, and for a mask constant that no dtype limits."""
    layer = code_at(_MODULE, "Gemma4AudioLayer.forward").co_names
    attention = code_at(_MODULE, "Gemma4AudioAttention.forward").co_names
    unlimited = _MASK in attention and "finfo" not in attention
    reason = "bounds and mask constant of the audio layers follow the tensors' dtype"
    return fixed_if("weight" not in layer and not unlimited, reason)


@PATCH.around(_MODULE, "Gemma4AudioFeedForward.forward")
@PATCH.around(_MODULE, "Gemma4AudioLightConv1d.forward")
@PATCH.around(_MODULE, "Gemma4AudioLayer.forward")
def clamping_forward(
    original: Any, self: Any, hidden_states: Any, *args: Any, **kwargs: Any
) -> Any:
    if largest := _limit(hidden_states):
        self = View(self, gradient_clipping=min(self.gradient_clipping, largest))
    return original(self, hidden_states, *args, **kwargs)


@PATCH.around(_MODULE, "Gemma4AudioAttention.forward")
def attention_forward(
    original: Any, self: Any, hidden_states: Any, *args: Any, **kwargs: Any
) -> Any:
    if largest := _limit(hidden_states):
        constant = max(getattr(self.config, _MASK), -largest)
        self = View(self, config=View(self.config, **{_MASK: constant}))
    return original(self, hidden_states, *args, **kwargs)


def _limit(states: Any) -> float | None:
    """The largest float16, if these states or what is computed from them are in float16."""
    import torch

    dtype, device = states.dtype, states.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return torch.finfo(dtype).max if dtype == torch.float16 else None
