"""The cross entropy of logits after a soft cap, and its gradient, in one kernel.

PyTorch needs a dozen kernels and 20 bytes for each entry of the logits.  This kernel
(``token_loss.cu``) needs the logits themselves: it writes the gradient over them.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

from .compiler import Kernel, KernelError, compiled, exponents
from .step import is_short_of_memory

logger = logging.getLogger(__name__)

_THREADS = 1024
_BYTES = 16  # of a load


def can_compute(device: Any, dtype: Any, size: int) -> bool:
    """Whether ``losses_`` can be called with logits [N, size]; the first call compiles the kernel.

    On meta, where sizes are counted, the answer is that of a GPU.
    """
    if dtype not in exponents() or device.type not in ("cuda", "meta"):
        return False
    try:
        return device.type == "meta" or _kernel(device, dtype, _values(dtype, size)) is not None
    except KernelError:  # Memory is short; the next call tries again.
        return False


def losses_(logits: Any, target: Any, cap: float, ignore_index: int) -> Any:
    """The loss of each row, float32 [N]; the logits become the gradient of their loss.

    Args:
        logits: [N, vocabulary] on a GPU, contiguous; bfloat16, float16, float32.
        target: [N] in int64 on that GPU.
        cap: of ``cap * tanh(logits / cap)``; 0 for none.
        ignore_index: Rows with this target have no loss and no gradient.
    """
    import torch

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if logits.is_meta or not len(logits):
        return losses
    kernel = _kernel(logits.device, logits.dtype, _values(logits.dtype, logits.shape[-1]))
    assert kernel is not None, "can_compute said no"
    # PyTorch multiplies by the inverse of a number, too.
    inverse = float(1 / torch.tensor(cap)) if cap else 0.0
    with torch.cuda.device(logits.device):
        kernel(
            (len(logits), 1), losses, logits, target.contiguous(), float(cap), inverse,
            ignore_index, logits.shape[-1], stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
    return losses


def _values(dtype: Any, size: int) -> int:
    """How many values the kernel reads at once."""
    values = _BYTES // int(dtype.itemsize)
    return values if size % values == 0 else 1


@cache
def _kernel(device: Any, dtype: Any, values: int) -> Kernel | None:
    file = Path(__file__).with_suffix(".cu")
    constants = {"BITS": 8 * dtype.itemsize, "EXPONENT": exponents()[dtype], "VALUES": values}
    try:
        return compiled(file, "token_loss", constants, device, _THREADS, 0)
    except KernelError as error:
        if is_short_of_memory(error):
            raise
        logger.info("PyTorch computes the loss: %s", error)
        return None
