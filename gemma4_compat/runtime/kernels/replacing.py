"""What a function needs to launch a kernel of this package in place of many of PyTorch's.

Each decode step calls these functions hundreds of times, so they cost the CPU little.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

logger = logging.getLogger(__name__)

#: bytes of a kernel's longest load
ALIGNMENT = 16
#: A call of a module runs these functions of its class.
_CALLS = ("__call__", "_call_impl")
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
            type(tensor) is Tensor
            and tensor.is_cuda
            and not is_compiling()
            and (has_gradients() if gradients else not has_gradients() and not autocasts("cuda"))
            and not modes()
            and (not function_modes() or are_defaults())
            and transform() is None
            and is_traced() is None
            and getattr(forward_ad, "_current_level", 0) < 0
            and not tensor.is_neg()
        )

    return is_plain


def can_read(*tensors: Any) -> bool:
    """Whether a kernel can read these: plain, contiguous, of one dtype, on the current GPU."""
    return all(map(plain(), tensors)) and all(
        each.get_device() == current_device()()
        and each.dtype is tensors[0].dtype
        and each.is_contiguous()
        and not each.data_ptr() % ALIGNMENT
        for each in tensors
    )


def runs_only(module: Any, forward: Any) -> bool:
    """Whether a call of a module runs this function of its class, and no hook.

    accelerate's hook for offloaded weights may be around it: where weights are must not change a
    result.  When accelerate removes a hook, it leaves the bound method.
    """
    from torch.nn.modules import module as nn_module

    kind, state, usual = type(module), vars(module), nn_module.Module
    called = state.get("forward")
    if "_hf_hook" in state:
        from accelerate.hooks import AlignDevicesHook

        hooked, called = called, state.get("_old_forward")
        if (
            type(state["_hf_hook"]) is not AlignDevicesHook
            or type(hooked) is not partial
            or getattr(hooked, "__wrapped__", None) != called
        ):
            return False
    is_own = getattr(called, "__func__", None) is forward and called.__self__ is module
    return (called is None or is_own) and not (
        any(getattr(kind, name, None) is not getattr(usual, name, None) for name in _CALLS)
        or getattr(module, "_compiled_call_impl", None) is not None
        or state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
    )


def is_gelu(activation: Any) -> bool:
    """Whether a call of an activation computes transformers' GELU with the tanh approximation."""
    import torch
    from transformers import activations

    if type(activation) is not activations.GELUTanh:
        return False
    forward, act = type(activation).forward, vars(activation).get("act")
    return (
        getattr(forward, "__globals__", None) is vars(activations)
        and isinstance(act, partial)
        and (act.func, act.args, act.keywords)
        == (torch.nn.functional.gelu, (), {"approximate": "tanh"})
        and runs_only(activation, forward)
    )


@cache
def current_device() -> Callable[[], int]:
    """A function that returns the index of the current GPU."""
    import torch

    get: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    return get


def as_current(index: int) -> AbstractContextManager[Any]:
    """A context in which this GPU is the current one."""
    import torch

    return nullcontext() if current_device()() == index else torch.cuda.device(index)


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
