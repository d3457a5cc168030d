"""The routed experts of a few tokens in two kernels of our own (``routed_experts.cu``).

bitsandbytes' kernels multiply with one matrix.  For the experts of one token they need the experts
in a row, so that most of the time goes into copies and launches.  These kernels read the packed
experts where they are, apply the activation, and add up the experts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.step import is_short_of_memory
from ..kernels.streams import Fork

if TYPE_CHECKING:
    from ..kernels.compiler import Kernel

logger = logging.getLogger(__name__)

#: More tokens share experts, which these kernels read once for each token.
TOKENS = 8

_MAX_EXPERTS = 16  # of a token
_OUTPUTS = 16  # of a block
_GATED_WARPS = 8
_UNIT = 64  # values
_NESTED_BLOCK = 256


@dataclass(frozen=True)
class _Shape:
    """What the kernels are compiled for."""

    device: Any
    bfloat16: bool
    nested: tuple[bool, bool]
    experts: int
    top_k: int
    hidden: int
    inner: int
    blocksizes: tuple[int, int]


def routed(module: Any, packed: dict[str, Any], inputs: Any, indices: Any, weights: Any) -> Any:
    """The output of an experts module, or ``None`` if the kernels cannot compute it.

    Args:
        module: The experts, with Gemma's activation.
        packed: Its two fused tensors, as ``Packed``.
        inputs: [tokens, hidden], in the compute dtype.
        indices: [tokens, top_k], the experts of each token.
        weights: [tokens, top_k], of these experts.
    """
    import torch

    if inputs.device.type != "cuda" or torch.compiler.is_compiling():
        return None
    if not 0 < len(inputs) <= TOKENS or not has_usual_gate(module):
        return None
    if not _is_gelu(module.act_fn):
        return None
    gate_up, down = packed["gate_up_proj"], packed["down_proj"]
    inputs = inputs.contiguous()
    indices = indices.to(torch.int64).contiguous()
    shape = _shape(gate_up, down, inputs, indices)
    if shape is None:
        return None
    copied = gate_up.in_host_memory or down.in_host_memory
    if copied:
        shape = replace(shape, experts=TOKENS * shape.top_k)  # for any number of tokens
    kernels = _kernels(shape)
    if kernels is None:
        return None
    if copied:  # short reads would leave the link idle
        chosen = indices.view(-1)
        with Fork(inputs.device, "maxima") as fork:  # short reads, beside the long ones
            states = gate_up.chosen_state(chosen), down.chosen_state(chosen)
        gate_up, down = gate_up.chosen(chosen, states[0]), down.chosen(chosen, states[1])
        fork.join()
        indices = torch.arange(len(chosen), device=inputs.device).view_as(indices)
        kernels = _kernels(replace(shape, nested=_are_nested(gate_up, down)))
        if kernels is None:
            return None
    weights = weights.float().contiguous()
    tokens, hidden = inputs.shape
    inner = inputs.new_empty(tokens, indices.shape[1], down.shape[2])
    out = inputs.new_empty(tokens, hidden)
    gated, down_and_sum = kernels
    with torch.cuda.device(inputs.device):
        stream = torch.cuda.current_stream(inputs.device).cuda_stream
        first = inner, inputs, indices, gate_up.state.code, gate_up.tensors()
        gated((inner[0].numel() // _OUTPUTS, tokens), *first, stream=stream)
        second = out, inner, indices, weights, down.state.code, down.tensors()
        down_and_sum((hidden // _OUTPUTS, tokens), *second, stream=stream)
    return out


def has_usual_gate(module: Any) -> bool:
    """Whether the gates are applied as transformers does: ``act_fn(gate) * up``."""
    from transformers.integrations import moe

    usual = getattr(moe, "_default_apply_gate", None)
    own = getattr(type(module), "_apply_gate", None)
    return own is not None and own is usual and "_apply_gate" not in vars(module)


def _is_gelu(activation: Any) -> bool:
    """Whether an activation is the one in the kernel, and no hook wants to see it."""
    import torch
    from torch.nn.modules import module as nn_module
    from transformers import activations

    if type(activation) is not activations.GELUTanh:
        return False
    forward, act = type(activation).forward, vars(activation).get("act")
    hooks = (
        nn_module._global_forward_hooks,
        nn_module._global_forward_pre_hooks,
        activation._forward_hooks,
        activation._forward_pre_hooks,
    )
    return (
        "forward" not in vars(activation)
        and getattr(forward, "__globals__", None) is vars(activations)
        and isinstance(act, partial)
        and (act.func, act.args, act.keywords)
        == (torch.nn.functional.gelu, (), {"approximate": "tanh"})
        and not any(hooks)
    )


def _shape(gate_up: Any, down: Any, inputs: Any, indices: Any) -> _Shape | None:
    """What to compile the kernels for; ``None`` if they cannot compute these experts."""
    import torch

    states = gate_up.state, down.state
    (experts, twice, hidden), (_, out, inner) = gate_up.shape, down.shape
    fits = (
        inputs.dtype in (torch.bfloat16, torch.float16)
        and inputs.data_ptr() % 16 == 0
        and indices.shape[-1] <= _MAX_EXPERTS
        and (twice, hidden) == (2 * inner, out)
        and hidden % _UNIT == inner % _UNIT == 0
        and gate_up.rows_are_blocks()
        and down.rows_are_blocks()
        and all(state.blocksize % _UNIT == 0 for state in states)
        and all(not s.nested or s.state2.blocksize == _NESTED_BLOCK for s in states)
    )
    if not fits:
        return None
    return _Shape(
        device=inputs.device,
        bfloat16=inputs.dtype == torch.bfloat16,
        nested=_are_nested(gate_up, down),
        experts=experts,
        top_k=indices.shape[-1],
        hidden=hidden,
        inner=inner,
        blocksizes=(states[0].blocksize, states[1].blocksize),
    )


def _are_nested(gate_up: Any, down: Any) -> tuple[bool, bool]:
    return bool(gate_up.state.nested), bool(down.state.nested)


#: The shapes for which this machine has no kernels.
_without: set[_Shape] = set()


def _kernels(shape: _Shape) -> tuple[Kernel, Kernel] | None:
    """The two kernels; ``None`` if this machine cannot compile or load them."""
    from ..kernels.compiler import KernelError

    if shape in _without:
        return None
    try:
        return _compiled(shape)
    except KernelError as error:
        if not is_short_of_memory(error):
            _without.add(shape)
        logger.info("bitsandbytes' kernels compute the experts in 4 bits: %s", error)
        return None


@cache
def _compiled(shape: _Shape) -> tuple[Kernel, Kernel]:
    """The two kernels.

    Raises:
        KernelError: this machine has no compiler for them, an older GPU, or no memory.
    """
    import torch

    from ..kernels.compiler import KernelError, compiled

    if torch.cuda.get_device_capability(shape.device) < (8, 0):
        raise KernelError("the GPU is older than they need")
    file = Path(__file__).with_name("routed_experts.cu")

    def kernel(number: int, rows: int, columns: int, vectors: int, warps: int) -> Kernel:
        constants = {
            "BFLOAT16": int(shape.bfloat16),
            "EXPERTS": shape.experts,
            "TOP_K": shape.top_k,
            "OUTPUTS": _OUTPUTS,
            "GATED": int(number == 0),
            "NESTED": int(shape.nested[number]),
            "ROWS": rows,
            "UNITS": columns // _UNIT,
            "BLOCK": shape.blocksizes[number] // _UNIT,
        }
        shared = 4 * 256 * _UNIT + 2 * vectors * columns + 64 * warps
        name = ("gated", "down")[number]
        return compiled(file, name, constants, shape.device, 32 * warps, shared)

    hidden, inner, top_k = shape.hidden, shape.inner, shape.top_k
    return (
        kernel(0, 2 * inner, hidden, 1, _GATED_WARPS),
        kernel(1, hidden, inner, top_k, top_k),
    )
