"""Computes an RMS norm for autograd: a kernel for the norm, and one for the gradient of its input.

The weight is frozen.  Autograd keeps the input in float32, as with transformers' code, so the
program may change the input before the backward.  With that code it keeps five more tensors.
A second derivative is autograd's own; it rounds some sums in another order.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import cache
from typing import Any

from .replacing import ALIGNMENT, raw_stream
from .rms_norm_launch import LAUNCHER, NORM, Launch, compared
from .trials import pattern, require_equal

_HEADS = 4  # of a trial
#: The kernels, and how many pointers and numbers each gets.
_KERNELS = {**NORM, "rms_norm_gradient": 7}
#: Modules whose kernel was not launched once.  A checkpoint raises if its recomputation keeps other
#: tensors than the first forward did.
_left_out: weakref.WeakSet[Any] = weakref.WeakSet()


def differentiable(original: Any, module: Any, inputs: Any, weight: Any, key: Any) -> Any:
    """The norm of plain inputs in 16 bits, for autograd; ``None`` if a kernel cannot compute it.

    Args:
        original: The forward of a class such as ``Gemma4RMSNorm``.
        key: What the kernel for norms and inputs of a kind is known by.
    """
    import torch

    trains = weight is not None and weight.requires_grad
    # In float32 autograd adds the parts of the gradient to those of other layers one by one.
    if trains or inputs.dtype == torch.float32 or module in _left_out:
        return None
    kinds = [
        _kinds(original, module, inputs, weight, key, swapped)
        for swapped in ((False, True) if inputs.dim() == 4 else (False,))
    ]
    rows = inputs.numel() // inputs.shape[-1]
    if None in kinds or rows > kinds[0][0].most_rows:
        _left_out.add(module)
        return None
    x = inputs.float()
    try:
        out = torch.empty_like(inputs)
        pointers = out.data_ptr(), x.data_ptr(), _pointer(weight)
        kinds[0][0](raw_stream()(x.get_device()), rows, *pointers)
    except Exception as error:  # the original raises it, too, or needs less memory
        _left_out.add(module)
        return LAUNCHER.failed(("gradient", False, *key), inputs.device, error)
    return _rms_norm()(x, weight, (original, module, kinds), [out])


@cache
def _rms_norm() -> Any:
    """The function that autograd differentiates; its last argument holds the norm."""
    import torch

    class RMSNorm(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, of: Any, out: list[Any]) -> Any:
            ctx.save_for_backward(x, weight)
            ctx.of = of
            return out.pop()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x, weight), (original, module, kinds) = ctx.saved_tensors, ctx.of
            again = torch.is_grad_enabled()  # for a second derivative
            out = None if again else _by_kernel(kinds, x, weight, grad)
            if out is None:
                out = _by_autograd(original, _with_weight(module, weight), x, grad, again)
            return out, None, None, None

    return RMSNorm.apply


def _kinds(original: Any, module: Any, inputs: Any, weight: Any, key: Any, swapped: bool) -> Any:
    """How both kernels are launched.

    ``swapped`` if heads come before tokens in the gradient: PyTorch may add in another order then.
    """
    import torch

    stream = raw_stream()(inputs.get_device())

    def compare(norm: Launch, gradient: Launch, trial: Any, weights: int) -> None:
        rows, size = trial.shape
        heads = min(_HEADS, rows) if swapped else 1
        shape = 1, rows // heads, heads, size
        x, out = trial.float(), torch.full_like(trial, float("nan"))
        norm(stream, rows, out.data_ptr(), x.data_ptr(), weights)
        require_equal(out, original(module, trial))
        grad = pattern((1, heads, shape[1], size), trial.dtype, trial.device, heads)
        expected = _by_autograd(original, module, x.view(shape), grad.transpose(1, 2))
        found = torch.full_like(x, float("nan"))
        pointers = found.data_ptr(), x.data_ptr(), grad.data_ptr(), weights
        gradient(stream, rows, *pointers, heads, shape[1])
        require_equal(found, expected.reshape(x.shape))

    def make() -> list[Launch] | None:
        return compared(module, inputs, weight, _KERNELS, compare, torch.float32)

    key = "gradient", swapped, *key
    return LAUNCHER.compared(key, inputs.device, make)


def _by_kernel(kinds: Any, x: Any, weight: Any, grad: Any) -> Any:
    """The gradient of the input; ``None`` if the kernel does not compute it."""
    import torch

    swapped = not grad.is_contiguous()
    if swapped and (len(kinds) < 2 or not grad.transpose(1, 2).is_contiguous()):
        return None
    if type(grad) is not torch.Tensor or grad.is_neg() or grad.data_ptr() % ALIGNMENT:
        return None
    rows = x.numel() // x.shape[-1]
    order = (x.shape[2], x.shape[1]) if swapped else (1, rows)
    with torch.cuda.device(x.device):
        out = torch.empty_like(x)
        pointers = out.data_ptr(), x.data_ptr(), grad.data_ptr(), _pointer(weight)
        kinds[swapped][1](raw_stream()(x.get_device()), rows, *pointers, *order)
    return out


def _by_autograd(original: Any, module: Any, x: Any, grad: Any, again: bool = False) -> Any:
    """The gradient of the original's input; with a graph for a second derivative ``again``."""
    import torch

    # The hooks of a checkpoint would count what this saves.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.enable_grad(), nullcontext() if again else hooks:
        leaf = x if again else x.detach().requires_grad_()
        out = original(module, leaf)
        return torch.autograd.grad(out, leaf, grad.float(), create_graph=again)[0]


def _pointer(weight: Any) -> int:
    return 0 if weight is None else int(weight.data_ptr())


def _with_weight(module: Any, weight: Any) -> Any:
    """The module as it was in the forward: an offloaded one has no weight after it."""
    same = object.__new__(type(module))
    same.__dict__.update(module.__dict__)
    same.__dict__["_parameters"] = {} if weight is None else {"weight": weight}
    return same
