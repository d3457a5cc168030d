"""Serializing a 4-bit layer that has run on the CPU changes its quant state.

On a CPU with AVX512-BF16, ``Linear4bit.forward`` repacks weight and quant state for the CPU on
first use, and ``state_dict()`` unpacks them again, in place.  Unpacking is lossy: the absmax of a
nested state is quantized again from bfloat16, and a single state keeps the repacked absmax beside
the unpacked weight.  So ``state_dict()``, ``save_pretrained`` or a dispatch of the model after a
forward writes values that are not in the checkpoint.  With single quantization, the next forward of
the same model is also wrong, without an error.

The fix stores the original quant state when it is repacked, and restores exactly this state when it
is unpacked, unless other code changed the repacked one meanwhile.  The packed weight itself is a
permutation, which unpacking reverses exactly.
"""

from __future__ import annotations

import logging
import zlib
from functools import cache
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed

_UNPACKED = "_unpacked_state"
logger = logging.getLogger(__name__)

PATCH = Patch(
    name="cpu_packed_state",
    symptom=(
        "state_dict(), saving or offloading a 4-bit model that has run on an AVX512-BF16 CPU "
        "writes a changed quant state; single-quantized layers then give wrong outputs"
    ),
    affects=("transformers", "bitsandbytes>=0.49"),
    unreported=("Found by the tests of this package; no report is known upstream."),
)


@PATCH.probe
def unpacking_is_lossy() -> Finding:
    """Pack and unpack one block of 32 x 64 values, without running a kernel."""
    import torch
    from bitsandbytes.functional import (
        QuantState,
        _convert_weight_packed_for_cpu,
        _convert_weight_packed_for_cpu_inverse,
    )

    absmax = torch.full((32,), 1.001)
    state = QuantState(absmax=absmax, shape=torch.Size((32, 64)), blocksize=64, dtype=torch.float32)
    weight = torch.arange(32 * 32, dtype=torch.int32).to(torch.uint8).reshape(-1, 1)
    packed, state = _convert_weight_packed_for_cpu(weight, state)
    unpacked, state = _convert_weight_packed_for_cpu_inverse(packed, state)
    if not torch.equal(unpacked, weight):
        return drifted("unpacking does not restore the weight")
    same = state.absmax.shape == absmax.shape and torch.equal(state.absmax, absmax)
    return fixed("unpacking restores the quant state") if same else broken()


@PATCH.around("bitsandbytes.functional", "_convert_weight_packed_for_cpu")
def convert_weight_packed_for_cpu(
    original: Any, qweight: Any, quant_state: Any, *args: Any, **kwargs: Any
) -> Any:
    import torch

    if torch.compiler.is_compiling():  # torch.compile cannot always trace the code below
        return original(qweight, quant_state, *args, **kwargs)
    before = dict(vars(quant_state))
    packed, quant_state = original(qweight, quant_state, *args, **kwargs)
    setattr(quant_state, _UNPACKED, (before, _checksums(quant_state)))
    return packed, quant_state


@PATCH.around("bitsandbytes.functional", "_convert_weight_packed_for_cpu_inverse")
def convert_weight_packed_for_cpu_inverse(
    original: Any, packed_weight: Any, quant_state: Any, *args: Any, **kwargs: Any
) -> Any:
    before, packed = vars(quant_state).pop(_UNPACKED, (None, None))
    unchanged = before is not None and packed == _checksums(quant_state)
    qweight, quant_state = original(packed_weight, quant_state, *args, **kwargs)
    if before is None:
        _warn_approximate()
    if unchanged:
        vars(quant_state).clear()
        vars(quant_state).update(before)
    elif not quant_state.nested:  # bitsandbytes leaves absmax in the order of the repacked weight
        quant_state.absmax = quant_state.absmax.T.reshape(-1).float()
    return qweight, quant_state


def _checksums(quant_state: Any) -> dict[str, int]:
    """A checksum of each tensor, by attribute; copies and pickles have the same."""
    import torch

    return {
        name: zlib.crc32(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
        for name, value in vars(quant_state).items()
        if isinstance(value, torch.Tensor)
    }


@cache
def _warn_approximate() -> None:
    """Warn once about a model that ran before the patch was applied."""
    logger.warning(
        "a 4-bit weight was repacked for the CPU before this patch was applied, so its quant state "
        "is restored only approximately; import gemma4_compat first and load the model again"
    )
