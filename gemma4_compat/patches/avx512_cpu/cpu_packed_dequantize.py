"""Dequantizing a 4-bit weight that has run on the CPU gives garbage.

On a CPU with AVX512-BF16, ``Linear4bit.forward`` repacks weight and quant state for the CPU on
first use.  ``bitsandbytes.functional.dequantize_4bit`` does not know this format and reads the
repacked weight as if it were unpacked.  It raises no exception, but returns values in the wrong
places with the wrong scales.  All code that dequantizes the weight of a layer after its first
forward gets wrong values: PEFT's merge and unmerge, ``model.dequantize()``, and the forward of
adapters that compute with the base weight (DoRA, HiRA).

The fix dequantizes an unpacked copy of such a weight.  The layer itself stays packed.
"""

from __future__ import annotations

import copy
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_of

PATCH = Patch(
    name="cpu_packed_dequantize",
    symptom=(
        "merging an adapter, dequantize() or a DoRA adapter on a 4-bit model that has run on an "
        "AVX512-BF16 CPU gives garbage, without an exception"
    ),
    affects=("transformers", "bitsandbytes>=0.49"),
    unreported=("Found by the tests of this package; no report is known upstream."),
)

_PACKED = "packing_format_for_cpu"


@PATCH.probe
def dequantize_ignores_packing() -> Finding:
    """Check whether dequantize_4bit reads the packing format of the weight."""
    from bitsandbytes import functional

    code = code_of(functional.dequantize_4bit)
    handled = _PACKED in (*code.co_names, *code.co_consts)
    return fixed_if(handled, "dequantize_4bit handles weights that are packed for the CPU")


@PATCH.around("bitsandbytes.functional", "dequantize_4bit")
def dequantize_4bit(
    original: Any, A: Any, quant_state: Any = None, *args: Any, **kwargs: Any
) -> Any:
    from bitsandbytes import functional

    if getattr(quant_state, _PACKED, False):
        # Unpacking changes the quant state in place, so it gets a copy.
        A, quant_state = functional._convert_weight_packed_for_cpu_inverse(
            A, copy.copy(quant_state)
        )
        if quant_state.absmax.dim() == 2:  # cpu_packed_state has not restored it
            quant_state.absmax = quant_state.absmax.T.reshape(-1).float()
    return original(A, quant_state, *args, **kwargs)
