"""Under float16 autocast, the audio tower uses bounds and a mask constant beyond float16.

The audio layers clamp to 1e10, or to the largest value of a dtype: that of a weight, or that of
the input.  Under autocast the clamped tensor is the output of a linear layer, in float16.  The
attention scores are a matrix product, in float16 as well, and their mask constant is -1e9.  PyTorch
converts neither number to float16.

The fix limits both to 65504 where float16 is at work.  The other scores are between -50 and 50, so
the softmax of a score of -65504 is exactly 0, as that of -1e9 is.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at
from ...objects import View

PATCH = Patch(
    name="audio_float16",
    symptom=(
        "sound with Trainer(fp16=True) or float16 autocast (T4, V100): value cannot be converted "
        "to type c10::Half without overflow"
    ),
    affects=("transformers",),
    unreported="Only unsloth-zoo's own code mentions it; no report is known upstream.",
)

_MODULE = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def numbers_beyond_float16() -> Finding:
    """Look for a bound from a weight's dtype, and for a mask constant that no dtype limits."""
    layer = code_at(_MODULE, "Gemma4AudioLayer.forward").co_names
    attention = code_at(_MODULE, "Gemma4AudioAttention.forward").co_names
    unlimited = "attention_invalid_logits_value" in attention and "finfo" not in attention
    return fixed_if("weight" not in layer and not unlimited, "the numbers follow the tensors")


def _forward(original: Any, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    dtype, device = hidden_states.dtype, hidden_states.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        constant = max(self.config.attention_invalid_logits_value, -most)
        config = View(self.config, attention_invalid_logits_value=constant)
        bound = min(getattr(self, "gradient_clipping", most), most)
        self = View(self, config=config, gradient_clipping=bound)
    return original(self, hidden_states, *args, **kwargs)


for _part in ("FeedForward", "LightConv1d", "Layer", "Attention"):
    PATCH.around(_MODULE, f"Gemma4Audio{_part}.forward")(_forward)
