"""Training a 4-bit model that has run on the CPU loses gradients.

On a CPU with AVX512-BF16, ``Linear4bit.forward`` repacks the weight for the CPU when the layer
first runs in eval mode, and the weight stays packed.  The kernel for packed weights does not
support autograd.  Training mode packs no weight, but runs the same kernel on a weight that is
already packed, and no gradient flows back through it.  The modules before the layer get too small a
gradient, or none.  If training continues after an evaluation or ``generate()``, most LoRA gradients
are missing or wrong.  No exception is raised.

The fix unpacks the weight of a layer that is in training mode, or whose input needs a gradient.
The layer then computes bit for bit as a layer that has never run in eval mode, which needs the
exact unpacking of ``cpu_packed_state``.  The next forward in eval mode packs the weight again.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from ...engine import Finding, Patch, fixed, fixed_if
from ...engine.probing import code_of, mentions
from ...objects import View

PATCH = Patch(
    name="cpu_packed_gradient",
    symptom=(
        "training a 4-bit model after an evaluation or generate() on an AVX512-BF16 CPU: gradients "
        "are missing or wrong, without an exception"
    ),
    affects=("transformers", "bitsandbytes>=0.49"),
    requires=("cpu_packed_state",),
    unreported=("Found by the tests of this package; no report is known upstream."),
)


@PATCH.probe
def packed_weights_stay_packed() -> Finding:
    """Check the code for unpacking; running the forward would start threads."""
    from bitsandbytes.functional import has_avx512bf16
    from bitsandbytes.nn.modules import Linear4bit

    if not has_avx512bf16():
        return fixed("bitsandbytes does not use the AVX512-BF16 kernel on this CPU")
    unpacks = mentions(code_of(Linear4bit.forward), "_convert_weight_packed_for_cpu_inverse")
    return fixed_if(unpacks, "Linear4bit.forward unpacks weights")


@PATCH.around("bitsandbytes.nn.modules", "Linear4bit.forward")
def linear_4bit_forward(original: Any, self: Any, x: Any) -> Any:
    import torch
    from bitsandbytes import functional

    state = getattr(self.weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        unpack = functional._convert_weight_packed_for_cpu_inverse
        if self.training:  # another weight may share the state, and stays packed
            self.weight.data, unpacked = unpack(self.weight.data, copy(state))
            self.weight.quant_state = unpacked
            if getattr(self, "quant_state", None) is state:
                self.quant_state = unpacked
        elif x.requires_grad and torch.is_grad_enabled():
            # The layer stays packed: other threads may run it without gradients.
            data, state = unpack(self.weight.data, copy(state))
            weight = torch.Tensor._make_subclass(type(self.weight), data, False)
            vars(weight).update(vars(self.weight), quant_state=state)
            return original(View(self, weight=weight), x)
    return original(self, x)
