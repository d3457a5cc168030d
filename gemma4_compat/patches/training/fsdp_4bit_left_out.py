"""accelerate leaves 4-bit weights out of FSDP2.

From 1.14 on, ``Accelerator.prepare`` passes each frozen ``Params4bit`` that is not floating point
to ``fully_shard`` as ignored, because FSDP2 would lose its quant state.  The default storage of
4-bit weights is uint8, so each process keeps all of them.  There is only a warning.

``fsdp_4bit`` keeps the quant states.  This fix tells accelerate that the weights are floating
point, so that it shards them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at
from ...objects import shadowed
from ._packed import is_4bit

PATCH = Patch(
    name="fsdp_4bit_left_out",
    symptom=(
        "with FSDP2, each process holds all 4-bit weights: Found 7 non-floating frozen Params4bit. "
        "Excluding from FSDP2 sharding to prevent quant_state corruption"
    ),
    affects=("transformers", "accelerate>=1.14", "bitsandbytes"),
    requires=("fsdp_4bit",),
    links=("https://github.com/huggingface/accelerate/pull/3987",),
)

_UTILS = "accelerate.utils.fsdp_utils"


@PATCH.probe
def weights_are_left_out() -> Finding:
    """Look for the question that accelerate asks each weight."""
    code = code_at(_UTILS, "fsdp2_prepare_model")
    asks = "is_floating_point" in code.co_names and "Params4bit" in code.co_consts
    return fixed_if(not asks, "accelerate shards 4-bit weights itself")


@PATCH.around(_UTILS, "fsdp2_prepare_model")
def fsdp2_prepare_model(
    original: Any, accelerator: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    with ExitStack() as stack:
        for parameter in model.parameters():
            if is_4bit(parameter):
                stack.enter_context(shadowed(parameter, is_floating_point=lambda: True))
        return original(accelerator, model, *args, **kwargs)
