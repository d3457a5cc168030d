"""Computes each RMS norm of a captured step in one kernel (``rms_norm.cu``).

transformers computes an RMS norm in nine kernels.  For one token each of them takes longer to start
than to run, so that the norms take half the time of a captured step.

The kernel's output equals that of the nine bit for bit, because it adds the squares in the same
order.  PyTorch does not document that order.  So the step that runs eagerly before a capture
compares the kernel with each kind of norm on random inputs, in float32, where another order shows,
and in the dtype of the step.  A norm for which an output differs stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .step import Call, is_short_of_memory, running
from .streams import is_capturing

if TYPE_CHECKING:
    from .compiler import Kernel

logger = logging.getLogger(__name__)

_WARP = 32
_MAX_THREADS = 512  # of a block in PyTorch's reductions
_TRIALS = 8


@dataclass(frozen=True)
class _Signature:
    """The norms and inputs that one comparison is valid for."""

    forward: Any  # the function of the norm's class
    device: Any
    dtype: Any
    weight: Any  # its dtype, or None
    shape: tuple[int, ...]
    settings: tuple[Any, ...]  # of the norm, such as eps


def norm_calls(modules: Iterable[Any]) -> list[Call]:
    """For ``in_step``: the RMS norms among these modules use one kernel in a capture.

    In the eager step before it they run as usual, and their kernel is compared with them.
    """
    norms = (module for module in modules if type(module).__name__.endswith("RMSNorm"))
    return [(module, partial(_norm, module)) for module in norms]


def _norm(module: Any, usual: Any, *args: Any, **kwargs: Any) -> Any:
    step = running()
    if step is None or step.failure is not None or len(args) != 1 or kwargs:
        return usual(*args, **kwargs)
    kernel = None
    try:
        signature = _signature(module, *args)
        if signature is not None and is_capturing(signature.device):
            kernel = step.kernels.get(signature)
        elif signature is not None and signature not in step.kernels:
            step.kernels[signature] = _equal_kernel(signature, module, usual)
    except Exception as error:
        step.failure = error
    return usual(*args) if kernel is None else _launch(kernel, module, *args)


def _signature(module: Any, inputs: Any) -> _Signature | None:
    """The signature of a call; ``None`` if the kernel cannot compute it."""
    import torch

    weight = module._parameters.get("weight")
    if type(inputs) is not torch.Tensor or inputs.ndim == 0:
        return None
    size = inputs.shape[-1]
    fits = (
        inputs.device.type == "cuda"
        and inputs.dtype in _dtypes()
        and size >= 4 * _WARP
        and size % 4 == 0
        and inputs.numel() > 0
        and _is_aligned(inputs)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and isinstance(getattr(module, "eps", None), float)
        and not (module._buffers or module._modules or module._parameters.keys() - {"weight"})
    )
    if fits and weight is not None:
        same = weight.device == inputs.device and weight.shape == (size,)
        fits = same and weight.dtype in _dtypes() and _is_aligned(weight)
    if not fits:
        return None
    settings = ((k, v) for k, v in vars(module).items() if isinstance(v, (bool, int, float, str)))
    return _Signature(
        forward=type(module).forward,
        device=inputs.device,
        dtype=inputs.dtype,
        weight=None if weight is None else weight.dtype,
        shape=tuple(inputs.shape),
        settings=tuple(sorted(settings)),
    )


def _is_aligned(tensor: Any) -> bool:
    """Whether a kernel can read four values at a time."""
    return bool(tensor.is_contiguous() and tensor.data_ptr() % (4 * tensor.itemsize) == 0)


def _equal_kernel(signature: _Signature, module: Any, original: Any) -> Kernel | None:
    """The kernel whose outputs equal those of a norm bit for bit; ``None`` if there is none.

    Raises:
        KernelError: Memory is short.
    """
    import torch

    from .compiler import KernelError

    generator = torch.Generator(signature.device).manual_seed(0)
    trials = [
        4 * torch.randn(signature.shape, generator=generator, device=signature.device)
        for _ in range(_TRIALS)
    ]

    def is_equal(kernel: Kernel, dtype: Any) -> bool:
        inputs = [trial.to(dtype) for trial in trials]
        return all(torch.equal(_launch(kernel, module, each), original(each)) for each in inputs)

    why = "its outputs would differ"
    try:
        for halving in (True, False):
            if is_equal(
                _kernel(signature.device, torch.float32, signature.weight, halving), torch.float32
            ):
                kernel = _kernel(signature.device, signature.dtype, signature.weight, halving)
                if is_equal(kernel, signature.dtype):
                    return kernel
    except KernelError as error:
        if is_short_of_memory(error):
            raise
        why = str(error)
    name = type(module).__name__
    logger.info("%s of %s does not run in one kernel: %s", name, signature.shape, why)
    return None


def _launch(kernel: Kernel, module: Any, inputs: Any) -> Any:
    import torch

    out, size = torch.empty_like(inputs), inputs.shape[-1]
    weight = module._parameters.get("weight")
    rows, fours = inputs.numel() // size, size // 4
    with torch.cuda.device(inputs.device):
        kernel(
            (rows, 1),
            out,
            inputs,
            inputs if weight is None else weight,  # a kernel without weights reads none
            fours,
            1 / size,
            module.eps,
            stream=torch.cuda.current_stream(inputs.device).cuda_stream,
            threads=_threads(rows, fours),
        )
    return out


def _threads(rows: int, fours: int) -> int:
    """The threads that add one row in PyTorch (``set_block_dimension`` in Reduce.cuh)."""
    width, height = (min(1 << (n.bit_length() - 1), _MAX_THREADS) for n in (fours, rows))
    height = min(height, _MAX_THREADS // min(width, _WARP))
    return min(width, _MAX_THREADS // height)


@cache
def _kernel(device: Any, dtype: Any, weight: Any, halving: bool) -> Kernel:
    """The compiled kernel.

    Raises:
        KernelError: This machine cannot compile it.
    """
    from .compiler import compiled

    file = Path(__file__).with_suffix(".cu")
    constants = {
        "INPUT": _dtypes()[dtype],
        "WEIGHT": 0 if weight is None else _dtypes()[weight],
        "THREADS": _MAX_THREADS,
        "HALVING": int(halving),
    }
    return compiled(file, "rms_norm", constants, device, _MAX_THREADS, 0)


@cache
def _dtypes() -> dict[Any, int]:
    """The numbers of the dtypes in the kernel's source."""
    import torch

    return {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
