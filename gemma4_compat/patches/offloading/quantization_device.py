"""A model with offloaded 4-bit layers loads slowly, because the CPU quantizes it.

A ``device_map`` for ``from_pretrained`` leaves offloaded layers unquantized.  So such a model is
loaded on the CPU, where bitsandbytes quantizes each weight, and dispatched then.  For 26B-A4B this
takes minutes, and the GPU does nothing.

In a block of ``gemma4_compat.quantize_on``, the fix copies each weight to the GPU, quantizes it
there, and copies the result back.  One weight at a time is on the GPU.  The values are those of a
model that is loaded on the GPU: bitsandbytes' kernels for the CPU round some others differently.
So nothing changes outside of such a block.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_at

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="quantization_device",
    kind=Kind.EXACT,
    symptom=(
        "from_pretrained of a 4-bit model on the CPU, to dispatch it with offloaded layers, takes "
        "minutes while the GPU does nothing"
    ),
    affects=("transformers", "bitsandbytes"),
    unreported="Only slow, not wrong; no report is known upstream.",
)

_device: ContextVar[Any] = ContextVar("device", default=None)


@contextmanager
def quantize_on(device: int | str) -> Iterator[None]:
    """A ``with`` block in which 4-bit weights for the CPU are quantized on a GPU.

    For ``from_pretrained(..., device_map={"": "cpu"})`` before accelerate's ``dispatch_model``; the
    weights are bit for bit those of a model that is loaded on this GPU.  It needs GPU memory for
    one weight at a time: 1.0 GiB for the experts of a layer of 26B-A4B.  A weight for which there
    is no memory is quantized on the CPU, and so are all if there is no GPU.  Other threads are not
    affected.

    Args:
        device: a GPU as PyTorch names it, such as ``0`` or ``"cuda:0"``.

    Example:
        >>> from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration
        >>> quantization = BitsAndBytesConfig(load_in_4bit=True)
        >>> with gemma4_compat.quantize_on(0):
        ...     model = Gemma4ForConditionalGeneration.from_pretrained(
        ...         "gemma-4-E2B-it", device_map={"": "cpu"}, quantization_config=quantization
        ...     )
    """
    import torch

    usable = torch.accelerator.is_available() or str(device) in ("cpu", "meta")
    token = _device.set(torch.device(device) if usable else None)
    try:
        yield
    finally:
        _device.reset(token)


@PATCH.probe
def weights_are_quantized_where_they_go() -> Finding:
    """Check whether a weight still goes to its device before it is quantized."""
    code = code_at("bitsandbytes.nn.modules", "Params4bit._quantize")
    moves = {"to", "quantize_4bit"} <= {*code.co_names}
    return fixed_if(not moves, "bitsandbytes chooses the device that quantizes itself")


@PATCH.around("bitsandbytes.nn.modules", "Params4bit._quantize")
def quantize(original: Any, self: Any, device: Any) -> Any:
    import torch

    gpu = _device.get()
    if gpu is None or torch.device(device).type != "cpu":
        return original(self, device)
    try:
        weight = original(self, gpu)
    except torch.OutOfMemoryError:
        logger.warning("a weight is quantized on the CPU: there is no memory for it on %s", gpu)
        return original(self, device)
    weight.quant_state.to(device)
    weight.data = weight.data.to(device)
    return weight
