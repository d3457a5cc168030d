"""Computes an RMS norm in one kernel (``rms_norm.cu``).

transformers computes it in nine kernels, and its gradient in fourteen.  For few tokens each of them
takes longer to start than to run: a token of E2B has 242 norms.  For many tokens, each of them
reads and writes all values in float32.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from .replacing import ALIGNMENT, as_current, plain, raw_stream
from .rms_norm_gradient import differentiable
from .rms_norm_launch import LAUNCHER, MANY_ROWS, NORM, Launch, compared
from .trials import require_equal


def in_one_kernel(original: Any) -> Any:
    """The forward of an RMS norm that uses the kernel where it can.

    Args:
        original: The forward of a class such as ``Gemma4RMSNorm``.
    """
    import torch

    is_plain, is_trained = plain(), plain(gradients=True)
    stream_of, empty_like, Tensor = raw_stream(), torch.empty_like, torch.Tensor

    def output(self: Any, inputs: Any, index: int, trained: bool) -> Any:
        """The norm of a plain tensor on this GPU; ``None`` if the kernel does not compute it."""
        own, shape = self.__dict__, inputs.shape
        eps = own.get("eps")
        size = shape[-1] if shape else 0
        if not size or type(eps) is not float or "_norm" in own or not inputs.is_contiguous():
            return None
        weight = dtype = None
        pointer, weights = inputs.data_ptr(), 0
        if self.with_scale:
            weight = weight_of(self, size, index)
            if weight is None:
                return None
            dtype, weights = weight.dtype, weight.data_ptr()
        if (pointer | weights) % ALIGNMENT:
            return None
        rows, cls = inputs.numel() // size, type(self)
        few = rows if rows < MANY_ROWS else MANY_ROWS
        key = original, cls, cls._norm, index, inputs.dtype, dtype, size, eps, few.bit_length()
        if trained and (inputs.requires_grad or (weight is not None and weight.requires_grad)):
            return differentiable(original, self, inputs, weight, key)
        kind = LAUNCHER.compared(key, inputs.device, _equal_kind, original, self, inputs, weight)
        if kind is None or rows > kind.most_rows:
            return None
        try:
            out = empty_like(inputs)
            kind(stream_of(index), rows, out.data_ptr(), pointer, weights)
        except Exception as error:  # the original raises it, too, or needs less memory
            return LAUNCHER.failed(key, inputs.device, error)
        return out

    @wraps(original)
    def forward(self: Any, hidden_states: Any) -> Any:
        out, trained = None, False
        is_on_gpu = type(hidden_states) is Tensor and hidden_states.is_cuda
        if is_on_gpu and (is_plain(hidden_states) or (trained := is_trained(hidden_states))):
            index = hidden_states.get_device()
            with as_current(index):
                out = output(self, hidden_states, index, trained)
        return original(self, hidden_states) if out is None else out

    return forward


def weight_of(norm: Any, size: int, index: int) -> Any:
    """The weight of a norm on this GPU; ``None`` if it is not a usual one of this size."""
    import torch

    weight = norm._parameters.get("weight")
    if type(weight) is not torch.nn.Parameter and type(weight) is not torch.Tensor:
        return None
    if hasattr(type(norm), "weight"):  # a property of a user's class
        return None
    if weight.get_device() != index or weight.numel() != size or weight.dim() != 1:
        return None
    return weight if weight.is_contiguous() else None


def _equal_kind(original: Any, module: Any, inputs: Any, weight: Any) -> Launch | None:
    """The kind whose outputs equal those of a norm bit for bit; ``None`` if it computes none."""
    import torch

    stream = raw_stream()(inputs.get_device())

    def compare(kind: Launch, trial: Any, weights: int) -> None:
        out = torch.full_like(trial, float("nan"))
        kind(stream, len(trial), out.data_ptr(), trial.data_ptr(), weights)
        require_equal(out, original(module, trial))

    kinds = compared(module, inputs, weight, NORM, compare)
    return None if kinds is None else kinds[0]
