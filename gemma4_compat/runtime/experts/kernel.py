"""The routed experts of a few tokens in two kernels of our own (``routed_experts.cu``).

bitsandbytes' kernels multiply with one matrix.  For the experts of one token they need the experts
in a row, so that most of the time goes into copies and launches.  These kernels read the packed
experts where they are, apply the activation, and add up the experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..kernels import compiler
from ..kernels.launch import Launcher
from ..kernels.replacing import is_gelu, raw_stream
from ..kernels.streams import Fork
from ..kernels.trials import maxima_of, pattern, require_near, values_of

LAUNCHER = Launcher("routed_experts", "bitsandbytes multiplies with the experts in 4 bits")

#: More tokens share experts, which these kernels read once for each token.
TOKENS = 8

_MAX_EXPERTS = 16  # of a token
_OUTPUTS = 16  # of a block
_GATED_WARPS = 8
_UNIT = 64  # values
_NESTED_BLOCK = 256
_FILE = Path(__file__).with_name("routed_experts.cu")


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
    if not is_gelu(module.act_fn):
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
    device, tokens = inputs.device, len(inputs)
    launch = LAUNCHER.get((shape, tokens), device, _launcher, shape, tokens, gate_up.state.code)
    if launch is None:
        return None
    try:
        if copied:  # short reads would leave the link idle
            chosen = indices.view(-1)
            with Fork(device) as fork:  # short reads, beside the long ones
                states = gate_up.chosen_state(chosen), down.chosen_state(chosen)
            gate_up, down = gate_up.chosen(chosen, states[0]), down.chosen(chosen, states[1])
            fork.join()
            indices = torch.arange(len(chosen), device=device).view_as(indices)
            shape = replace(shape, nested=_are_nested(gate_up, down))
            kind = shape, tokens
            launch = LAUNCHER.get(kind, device, _launcher, shape, tokens, gate_up.state.code)
            if launch is None:
                return None
        return launch(inputs, indices, weights.float().contiguous(), gate_up, down)
    except Exception as error:  # bitsandbytes computes it, or raises its own error
        return LAUNCHER.failed((shape, tokens), device, error)


def has_usual_gate(module: Any) -> bool:
    """Whether the gates are applied as transformers does: ``act_fn(gate) * up``."""
    from transformers.integrations import moe

    usual = getattr(moe, "_default_apply_gate", None)
    own = getattr(type(module), "_apply_gate", None)
    return own is not None and own is usual and "_apply_gate" not in vars(module)


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


def _launcher(shape: _Shape, tokens: int, code: Any) -> Any:
    """A function that launches the kernels for this number of tokens."""
    LAUNCHER.checked(shape, shape.device, _compare, shape, code)
    first, second = _launchers(shape, tokens)

    def launch(inputs: Any, indices: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        inner = inputs.new_empty(tokens, shape.top_k, shape.inner)
        out = inputs.new_empty(tokens, shape.hidden)
        first(inner, inputs, indices, gate_up.state.code, *gate_up.tensors())
        second(out, inner, indices, weights, down.state.code, *down.tensors())
        return out

    return launch


def _launchers(shape: _Shape, tokens: int) -> list[Any]:
    """Functions that launch the two kernels; each gets the tensors of its parameters."""
    import torch

    if torch.cuda.get_device_capability(shape.device) < (8, 0):
        raise compiler.KernelError("the GPU is older than they need")
    hidden, inner, top_k = shape.hidden, shape.inner, shape.top_k

    def launching(
        number: int, rows: int, columns: int, vectors: int, warps: int, blocks: int
    ) -> Any:
        nested = shape.nested[number]
        constants = {
            "BFLOAT16": int(shape.bfloat16),
            "EXPERTS": shape.experts,
            "TOP_K": top_k,
            "OUTPUTS": _OUTPUTS,
            "GATED": int(number == 0),
            "NESTED": int(nested),
            "ROWS": rows,
            "UNITS": columns // _UNIT,
            "BLOCK": shape.blocksizes[number] // _UNIT,
        }
        shared = 4 * 256 * _UNIT + 2 * vectors * columns + 64 * warps
        name = ("gated", "down")[number]
        kernel = compiler.compiled(_FILE, name, shape.device, shared, **constants)
        passed = 4 + number + (5 if nested else 2)  # the last ones in a struct
        launch = compiler.launcher(kernel, passed, (), (32 * warps, 1), rows=tokens)

        def launched(*tensors: Any) -> None:
            pointers = [tensor.data_ptr() for tensor in tensors]
            with torch.cuda.device(shape.device):
                launch(blocks, raw_stream()(shape.device.index), *pointers)

        return launched

    return [
        launching(0, 2 * inner, hidden, 1, _GATED_WARPS, top_k * inner // _OUTPUTS),
        launching(1, hidden, inner, top_k, top_k, hidden // _OUTPUTS),
    ]


def _compare(shape: _Shape, code: Any) -> None:
    """Compare each kernel with PyTorch's for some tokens, two experts and some of their rows."""
    import torch
    from torch.nn.functional import gelu, linear

    device, dtype = shape.device, torch.bfloat16 if shape.bfloat16 else torch.float16
    tokens, top_k, experts = TOKENS, shape.top_k, min(2, shape.experts)
    chosen = torch.arange(tokens * top_k, device=device).view(tokens, top_k) % experts
    inputs = pattern((tokens, shape.hidden), dtype, device) * 4 / shape.hidden**0.5
    routing = pattern((tokens, top_k), dtype, device, 1)
    code2 = pattern((256,), torch.float32, device, 2)
    bits = pattern((65_521,), torch.float32, device, 6).mul_(128).to(torch.int8).view(torch.uint8)

    def weight(number: int, rows: int, columns: int, read: Any) -> tuple[Any, Any]:
        """The tensors of a weight, and the values of some rows in float64."""
        count = experts * rows * columns // 2
        packed = bits.repeat(-(-count // len(bits)))[:count].view(experts, rows, -1)
        nested = code2 if shape.nested[number] else None
        tensors, maxima = maxima_of(2 * count // shape.blocksizes[number], device, nested)
        maxima = maxima.view(experts, rows, -1)[:, read]
        return (code, packed, *tensors), values_of(packed[:, read], code, maxima)

    def gated(inputs: Any, weight: Any) -> Any:
        outputs = linear(inputs, weight.flatten(0, 1)).view(tokens, experts, 2, -1)
        inner = gelu(outputs[:, :, 0], approximate="tanh") * outputs[:, :, 1]
        return inner.gather(1, chosen[..., None].expand(-1, -1, inner.shape[-1]))

    def summed(inner: Any, weight: Any) -> Any:
        outputs = linear(inner, weight.flatten(0, 1)).view(tokens, top_k, experts, -1)
        places = chosen[..., None, None].expand(-1, -1, 1, outputs.shape[-1])
        return (outputs.gather(2, places)[:, :, 0] * routing[..., None].to(inner.dtype)).sum(1)

    first, second = _launchers(shape, tokens)
    read = torch.arange(shape.inner - 1, -1, -(shape.inner // 32), device=device)
    tensors, exact = weight(0, 2 * shape.inner, shape.hidden, torch.cat([read, read + shape.inner]))
    inner = inputs.new_full((tokens, top_k, shape.inner), float("nan"))
    first(inner, inputs, chosen, *tensors)
    require_near(inner[..., read], gated(inputs, exact.to(dtype)), gated(inputs.double(), exact))
    read = torch.arange(shape.hidden - 1, -1, -(shape.hidden // 32), device=device)
    tensors, exact = weight(1, shape.hidden, shape.inner, read)
    out = torch.full_like(inputs, float("nan"))
    second(out, inner, chosen, routing.float(), *tensors)
    require_near(out[:, read], summed(inner, exact.to(dtype)), summed(inner.double(), exact))
