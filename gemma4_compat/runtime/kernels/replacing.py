"""What a function needs to launch a kernel of this package in place of many of PyTorch's.

Each decode step calls these functions hundreds of times, so they cost the CPU little.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

#: With so many tokens or fewer, the kernels for one token's products and attention compute them.
FEW_TOKENS = 8


@cache
def plain(gradients: bool = False) -> Callable[[Any], bool]:
    """A function that says whether only the values of this tensor decide what PyTorch computes.

    That is a tensor on a GPU, without gradients, autocast, tracing, transforms or modes, which
    would see the operators.  With ``gradients``, they are enabled, and autocast may be.
    """
    import torch
    from torch.autograd import forward_ad

    try:
        from torch.overrides import _get_current_function_mode_stack
        from torch.utils._device import DeviceContext

        own, transform = torch._C, torch._C._functorch.peek_interpreter_stack
        modes, function_modes = own._len_torch_dispatch_stack, own._len_torch_function_stack
        is_traced, autocasts = own._get_tracing_state, torch.is_autocast_enabled
    except (AttributeError, ImportError):  # a PyTorch with other private names
        logger.info("PyTorch's kernels run, not those of this package", exc_info=True)
        return lambda tensor: False
    is_compiling, has_gradients = torch.compiler.is_compiling, torch.is_grad_enabled
    Tensor = torch.Tensor

    def are_defaults() -> bool:
        """Whether the modes only choose the device of new tensors."""
        return all(type(each) is DeviceContext for each in _get_current_function_mode_stack())

    def is_plain(tensor: Any) -> bool:
        return (
            not is_compiling()
            and type(tensor) is Tensor
            and tensor.is_cuda
            and (has_gradients() if gradients else not has_gradients() and not autocasts("cuda"))
            and not modes()
            and (not function_modes() or are_defaults())
            and transform() is None
            and is_traced() is None
            and getattr(forward_ad, "_current_level", 0) < 0
            and not tensor.is_neg()
        )

    return is_plain


@cache
def current_device() -> Callable[[], int]:
    """A function that returns the index of the current GPU."""
    import torch

    get: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    return get


@cache
def raw_stream() -> Callable[[int], int]:
    """A function that returns the handle of a GPU's current stream."""
    import torch

    def stream_of(index: int) -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)

    get: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", stream_of)
    return get


@cache
def dtypes() -> dict[Any, int]:
    """The numbers of the dtypes in ``values.cuh``."""
    import torch

    return {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
