"""Training a 4-bit model that has run on the CPU leaves out gradients.

On a CPU with AVX512-BF16 ``Linear4bit.forward`` repacks the weight for the CPU the first time that
the layer runs in eval mode, and the weight stays so.  What runs on a packed weight is a kernel that
autograd knows nothing of.  In training nothing is packed, but a weight that is packed already goes
to that kernel all the same, and no gradient comes back through it.  What comes before the layer
gets less of one, or none: generate a sample, or evaluate, and go on training, and most LoRA
gradients are missing or wrong.  Nothing is raised.

The fix unpacks the weight of a layer that is in training mode, or whose input needs a gradient.
From then on it computes as a layer that has never run in eval mode, bit for bit, which takes the
exact way back of ``cpu_packed_state``.  The next forward in eval mode packs it again.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from .._code import mentions

PATCH = Patch(
    name="cpu_packed_gradient",
    symptom=(
        "training a 4-bit model after an evaluation or generate() on an AVX512-BF16 CPU: gradients "
        "are missing or wrong, without an exception"
    ),
    affects=("transformers", "bitsandbytes>=0.49"),
    requires=("cpu_packed_state",),
    changes=(
        "bitsandbytes' Linear4bit.forward unpacks a weight that was repacked for the CPU where the "
        "layer is in training mode or its input needs a gradient."
    ),
    unreported=("Found by the tests of this package; no report is known upstream."),
)


@PATCH.probe
def packed_weights_stay_packed() -> Finding:
    """Look whether the forward packs, and never unpacks.  Running it would start threads."""
    import inspect

    from bitsandbytes.functional import has_avx512bf16
    from bitsandbytes.nn.modules import Linear4bit

    if not has_avx512bf16():
        return fixed("bitsandbytes does not use that kernel on this CPU")
    if mentions(
        inspect.unwrap(Linear4bit.forward).__code__, "_convert_weight_packed_for_cpu_inverse"
    ):
        return fixed("Linear4bit.forward unpacks weights")
    return broken()


@PATCH.replaces("bitsandbytes.nn.modules", "Linear4bit.forward")
def linear_4bit_forward(original: Any) -> Any:
    import torch
    from bitsandbytes import functional

    @wraps(original)
    def forward(self: Any, x: Any) -> Any:
        state = getattr(self.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            if self.training or (x.requires_grad and torch.is_grad_enabled()):
                self.weight.data, self.weight.quant_state = (
                    functional._convert_weight_packed_for_cpu_inverse(self.weight.data, state)
                )
        return original(self, x)

    return forward
