"""With gradient checkpointing, all offloaded 4-bit weights are on the GPU at the end of a forward.

bitsandbytes keeps the packed weight for the backward as an attribute of the autograd node, not with
``save_for_backward``.  A checkpoint with ``use_reentrant=False`` drops only what is saved that way.
So the copy of each offloaded weight that the forward loaded stays until the backward, and
offloading decoder layers saves no memory in training: 8 GiB for 33 layers of 31B.

The fix saves the copy, and the tensors of its quant state, with ``save_for_backward``.  They may be
views of one block, so each of them would keep the others.  The recomputation of a checkpoint loads
them again.  Weights that are not offloaded stay attributes, which is faster.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ...model.quant_state import is_of_offloaded, tensors_of, with_tensors

PATCH = Patch(
    name="checkpointed_4bit_offload",
    symptom=(
        "torch.OutOfMemoryError in QLoRA of a 4-bit model with offloaded decoder layers: the "
        "forward leaves all of them on the GPU, in spite of gradient checkpointing"
    ),
    affects=("transformers", "bitsandbytes"),
    kind=Kind.MEMORY,
    requires=("quant_state_offload",),
    unreported="accelerate refuses this training without kbit_offload_training, of this package.",
)

_MODULE = "bitsandbytes.autograd._functions"


@PATCH.probe
def the_weight_is_an_attribute() -> Finding:
    code = code_at(_MODULE, "MatMul4Bit.forward")
    return fixed_if(not mentions(code, "tensors"), "MatMul4Bit saves its weight for the backward")


@PATCH.around(_MODULE, "MatMul4Bit.forward")
def forward(original: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(ctx, *args, **kwargs)
    _, weight = getattr(ctx, "tensors", (None, None))
    if weight is not None and is_of_offloaded(ctx.state):
        tensors = tensors_of(ctx.state)
        ctx.save_for_backward(weight, *tensors.values())
        ctx.tensors, ctx.state = None, with_tensors(ctx.state, dict.fromkeys(tensors))
    return output


@PATCH.around(_MODULE, "MatMul4Bit.backward")
def backward(original: Any, ctx: Any, grad_output: Any) -> Any:
    if getattr(ctx, "tensors", ()) is not None:
        return original(ctx, grad_output)
    weight, *saved = ctx.saved_tensors
    state = ctx.state
    ctx.tensors = None, weight
    ctx.state = with_tensors(state, dict(zip(tensors_of(state), saved, strict=True)))
    try:
        return original(ctx, grad_output)
    finally:  # for another backward
        ctx.tensors, ctx.state = None, state
