"""The product of an 8-bit layer with an outlier threshold, for captured steps.

These kernels (``int8_outliers.cu``) list the columns of the outliers on the GPU.  All other
products come from bitsandbytes' own kernels.  The products of the outliers are added in float32
in the order of the columns, and rounded once.  bitsandbytes leaves their order to cuBLAS, so that
outputs with two or more outliers can differ from an eager step by the last bit.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compiler import exponents
from .step import running
from .streams import is_capturing
from .watch import is_of_user

if TYPE_CHECKING:
    from .compiler import Kernel

_SEPARATE_THREADS = 1024
_ADD_THREADS = 256


def has_threshold(module: Any) -> bool:
    """Whether this is an 8-bit layer that searches its inputs for outliers."""
    if type(module).__name__ != "Linear8bitLt":
        return False
    return bool(getattr(getattr(module, "state", None), "threshold", 0))


def can_search(device: Any) -> bool:
    """Whether to expect that the kernels compile for this GPU; the first step compiles them."""
    import torch

    return device.type == "cuda" and torch.version.cuda is not None


def matmul(original: Any, A: Any, B: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of ``bitsandbytes.matmul``: in a step, layers search for outliers on the GPU.

    Layers with several rows of inputs search as bitsandbytes does, except in a capture, where they
    raise a ``NotImplementedError``.
    """
    step, state = running(), kwargs.get("state")
    if step is None or step.failure is not None or state is None or not state.threshold:
        return original(A, B, *args, **kwargs)
    obstacle = _obstacle(A, state)
    if is_capturing(A.device):
        if obstacle is not None:
            raise NotImplementedError(obstacle)
        return product(A, state, kwargs.get("bias"))
    if obstacle is None:
        try:
            output = product(A, state, kwargs.get("bias"))
            step.searched = True
            return output
        except Exception as error:
            if is_of_user(error):
                raise
            step.failure = error
    return original(A, B, *args, **kwargs)


def _obstacle(inputs: Any, state: Any) -> str | None:
    """The reason why ``product`` cannot compute this output; ``None`` if it can."""
    if inputs.numel() != inputs.shape[-1]:
        return "an 8-bit layer with an outlier threshold has several rows of inputs"
    weight = state.CB
    if state.has_fp16_weights or weight is None or not weight.is_contiguous() or state.SCB is None:
        return "the weight of an 8-bit layer is not in 8 bits"
    if inputs.device.type != "cuda" or inputs.dtype not in exponents():
        return f"an 8-bit layer has {inputs.dtype} inputs"
    return None


def product(inputs: Any, state: Any, bias: Any) -> Any:
    """The output of an 8-bit layer for one row.

    Args:
        inputs: [..., inputs of the layer], one row in all, on a GPU; bfloat16, float16, float32.
        state: The ``MatmulLtState`` of the layer: CB [outputs, inputs] in int8, SCB [outputs] in
            float32, threshold.
        bias: [outputs], or ``None``.
    """
    import torch

    size, outputs = inputs.shape[-1], state.CB.shape[0]
    row, scales = inputs.reshape(1, size).contiguous(), state.SCB.contiguous()
    rest = torch.empty(1, size, dtype=torch.float16, device=row.device)
    columns = torch.empty(size, dtype=torch.int32, device=row.device)
    count = torch.empty(1, dtype=torch.int32, device=row.device)
    stream = torch.cuda.current_stream(row.device).cuda_stream
    separate, add = _kernels(row.device, row.dtype)
    own = torch.ops.bitsandbytes
    with torch.cuda.device(row.device):
        separate((1, 1), rest, columns, count, row, float(state.threshold), size, stream=stream)
        quantized, maxima, _ = own.int8_vectorwise_quant.default(rest, 0.0)
        out = own.int8_scaled_mm.default(
            quantized, state.CB, maxima, scales, bias=bias, dtype=row.dtype
        )
        blocks = -(-outputs // _ADD_THREADS)
        outliers = row, columns, count
        add((blocks, 1), out, *outliers, state.CB, scales, outputs, size, stream=stream)
    return out.reshape(*inputs.shape[:-1], outputs)


@cache
def _kernels(device: Any, dtype: Any) -> tuple[Kernel, Kernel]:
    """``separate`` and ``add``.

    Raises:
        KernelError: This machine cannot compile them.
    """
    from .compiler import compiled

    file = Path(__file__).with_suffix(".cu")
    constants = {"BITS": 8 * dtype.itemsize, "EXPONENT": exponents()[dtype]}
    return (
        compiled(file, "separate", constants, device, _SEPARATE_THREADS, 0),
        compiled(file, "add", constants, device, _ADD_THREADS, 0),
    )
