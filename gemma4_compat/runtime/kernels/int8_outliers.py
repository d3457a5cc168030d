"""The product of an 8-bit layer with an outlier threshold, for captured steps.

These kernels (``int8_outliers.cu``) list the columns of the outliers on the GPU.  All other
products come from bitsandbytes' own kernels.  The products of the outliers are added in float32
in the order of the columns, and rounded once.  bitsandbytes leaves their order to cuBLAS, so that
outputs with two or more outliers can differ from an eager step by the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import compiler
from .launch import Family
from .replacing import dtypes, raw_stream
from .step import running
from .streams import is_capturing
from .trials import pattern, require_equal, require_near

FAMILY = Family("int8_outliers", "bitsandbytes searches for outliers in 8-bit layers")

_FILE = Path(__file__).with_suffix(".cu")
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
        return product(original, A, state, kwargs.get("bias"))
    if obstacle is None:
        try:
            output = product(original, A, state, kwargs.get("bias"))
            step.searched = True
            return output
        except Exception as error:
            FAMILY.failed((A.device, A.dtype), A.device, error)
            step.failure = error
    return original(A, B, *args, **kwargs)


def _obstacle(inputs: Any, state: Any) -> str | None:
    """The reason why ``product`` cannot compute this output; ``None`` if it can."""
    if inputs.numel() != inputs.shape[-1]:
        return "an 8-bit layer with an outlier threshold has several rows of inputs"
    weight = state.CB
    if state.has_fp16_weights or weight is None or not weight.is_contiguous() or state.SCB is None:
        return "the weight of an 8-bit layer is not in 8 bits"
    if inputs.device.type != "cuda" or inputs.dtype not in dtypes():
        return f"an 8-bit layer has {inputs.dtype} inputs"
    return None


def product(original: Any, inputs: Any, state: Any, bias: Any) -> Any:
    """The output of an 8-bit layer for one row.

    Args:
        original: ``bitsandbytes.matmul``.
        inputs: [..., inputs of the layer], one row in all, on a GPU; bfloat16, float16, float32.
        state: The ``MatmulLtState`` of the layer: CB [outputs, inputs] in int8, SCB [outputs] in
            float32, threshold.
        bias: [outputs], or ``None``.

    Raises:
        KernelError: The kernels failed, or a stream is captured before their first use.
    """
    kind = inputs.device, inputs.dtype
    kernels = FAMILY.checked(kind, inputs.device, _compared, original, type(state), *kind)
    return _product(kernels, inputs, state, bias)


def _product(kernels: tuple[Any, Any], inputs: Any, state: Any, bias: Any) -> Any:
    import torch

    size, outputs = inputs.shape[-1], state.CB.shape[0]
    row, scales = inputs.reshape(1, size).contiguous(), state.SCB.contiguous()
    rest = torch.empty(1, size, dtype=torch.float16, device=row.device)
    columns = torch.empty(size, dtype=torch.int32, device=row.device)
    count = torch.empty(1, dtype=torch.int32, device=row.device)
    numbers = float(state.threshold), size
    separate = compiler.launcher(kernels[0], 4, numbers, (_SEPARATE_THREADS, 1))
    add = compiler.launcher(kernels[1], 6, (outputs, size), (_ADD_THREADS, 1))
    stream, own = raw_stream()(row.get_device()), torch.ops.bitsandbytes
    with torch.cuda.device(row.device):
        separate(1, stream, *(each.data_ptr() for each in (rest, columns, count, row)))
        quantized, maxima, _ = own.int8_vectorwise_quant.default(rest, 0.0)
        out = own.int8_scaled_mm.default(
            quantized, state.CB, maxima, scales, bias=bias, dtype=row.dtype
        )
        tensors = out, row, columns, count, state.CB, scales
        add(-(-outputs // _ADD_THREADS), stream, *(each.data_ptr() for each in tensors))
    return out.reshape(*inputs.shape[:-1], outputs)


def _compared(original: Any, kind: type, device: Any, dtype: Any) -> tuple[Any, Any]:
    """The compiled ``separate`` and ``add``.  One outlier: equal bits.  Several: as exact."""
    import torch

    constants = {"INPUT": dtypes()[dtype]}
    separate, add = (
        compiler.compiled(_FILE, name, device, **constants) for name in ("separate", "add")
    )
    state, size, outputs = kind(), 1600, 264
    state.CB = pattern((outputs, size), torch.float32, device).mul_(127).to(torch.int8)
    state.SCB = 1 + pattern((outputs,), torch.float32, device, 1) / 2
    state.threshold, state.has_fp16_weights, state.is_training = 6.0, False, False
    row, places = 4 * pattern((1, size), dtype, device, 2), [777, 3, 1024, 1599]
    row[:, places] = 0
    rest = original(row, state.CB, state=state)
    for several in (places[:1], places):
        row[:, several] = pattern((len(several),), dtype, device, 3) + 20
        found, theirs = (
            _product((separate, add), row, state, None),
            original(row, state.CB, state=state),
        )
        if len(several) == 1:
            require_equal(found, theirs)
        weight = state.CB[:, several].double() * state.SCB.double()[:, None] / 127
        exact = rest.double() + (weight * row[:, several].double()).sum(-1)
        require_near(found, theirs, exact)
    return separate, add
