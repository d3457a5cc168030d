"""Two threads that run a new 4-bit model on the CPU at once repack the same weight twice.

On a CPU with AVX512-BF16, ``Linear4bit.forward`` repacks the weight for the CPU when the layer
first runs in eval mode.  It first changes the quant state in place, step by step, and then the
weight.  A second thread sees a state that is half changed, or repacks a weight that is repacked
already.  Forwards then fail, or all later outputs of the layer are wrong, without an exception.

The fix takes a lock for a forward that may repack the weight.  Once such a forward has ended, the
layer runs without the lock.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from ...engine import Finding, Patch, fixed, fixed_if
from ...objects import ForkableLock
from .._code import code_of, mentions

PATCH = Patch(
    name="cpu_packing_threads",
    symptom=(
        "a 4-bit model on an AVX512-BF16 CPU gives wrong outputs or raises errors if its first "
        "forwards run in several threads"
    ),
    affects=("transformers", "bitsandbytes>=0.49"),
    changes=(
        "bitsandbytes' Linear4bit.forward takes a lock until the weight of the layer is repacked "
        "for the CPU."
    ),
    unreported=("Found by the tests of this package; no report is known upstream."),
)

#: On a quant state: the weight was repacked too.
_PACKED = "_packed_with_weight"

_packing = ForkableLock()


@PATCH.probe
def packing_takes_no_lock() -> Finding:
    """Check whether the forward repacks weights, and for a lock."""
    from bitsandbytes.functional import has_avx512bf16
    from bitsandbytes.nn.modules import Linear4bit

    if not has_avx512bf16():
        return fixed("bitsandbytes does not use the AVX512-BF16 kernel on this CPU")
    code = code_of(Linear4bit.forward)
    repacks = mentions(code, "_convert_weight_packed_for_cpu") and not mentions(code, "lock")
    return fixed_if(not repacks, "Linear4bit.forward no longer repacks weights without a lock")


@PATCH.around("bitsandbytes.nn.modules", "Linear4bit.forward")
def linear_4bit_forward(original: Any, self: Any, x: Any) -> Any:
    import torch
    from bitsandbytes.nn import modules

    state = getattr(self.weight, "quant_state", None)
    if (
        state is None
        or hasattr(state, _PACKED)
        or self.training
        or x.requires_grad
        or x.device.type != "cpu"
        or not self.support_avx512bf16_for_cpu
        or torch.compiler.is_compiling()
    ):
        return original(self, x)
    with _packing.now:
        state = self.weight.quant_state
        if not getattr(state, "packing_format_for_cpu", False):
            # A copy: the graph of an earlier forward has the state, and the weight as it is.
            packed = modules._convert_weight_packed_for_cpu(self.weight.data, copy(state))
            self.weight.data, self.weight.quant_state = packed
            if vars(self).get("quant_state") is state:
                self.quant_state = self.weight.quant_state
        output = original(self, x)
        setattr(self.weight.quant_state, _PACKED, True)
        return output
