"""The cross entropy of logits after a soft cap, and its gradient, in one kernel.

PyTorch needs a dozen kernels and 20 bytes for each entry of the logits.  This kernel
(``token_loss.cu``) needs the logits themselves: it writes the gradient over them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import compiler
from .launch import Launcher
from .replacing import dtypes, raw_stream
from .trials import pattern, require_near

LAUNCHER = Launcher("token_loss", "PyTorch computes the loss of tokens in its own kernels")

_FILE = Path(__file__).with_suffix(".cu")
_THREADS = 1024
_BYTES = 16  # of a load


def can_compute(device: Any, dtype: Any, size: int) -> bool:
    """Whether ``losses_`` can be called with logits [N, size]; the first call compares the kernel.

    On meta, where sizes are counted, the answer is that of a GPU.
    """
    if dtype not in dtypes() or device.type not in ("cuda", "meta"):
        return False
    kind = device, dtype, _values(dtype, size)
    if device.type == "meta":
        return True
    return LAUNCHER.get(kind, device, LAUNCHER.checked, kind, device, _compared, *kind) is not None


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
    kind = logits.device, logits.dtype, _values(logits.dtype, logits.shape[-1])
    try:
        kernel = LAUNCHER.checked(kind, logits.device, _compared, *kind)
        _launch(kernel, losses, logits, target.contiguous(), cap, ignore_index)
    except Exception as error:
        LAUNCHER.failed(kind, logits.device, error)
        losses, gradients = _by_pytorch(logits, target, cap, ignore_index)
        logits.copy_(gradients)
    return losses


def _launch(kernel: Any, losses: Any, logits: Any, target: Any, cap: float, ignored: int) -> None:
    import torch

    # PyTorch multiplies by the inverse of a number, too.
    inverse = float(1 / torch.tensor(cap, dtype=torch.float32, device="cpu")) if cap else 0.0
    numbers = float(cap), inverse, ignored, logits.shape[-1]
    launch = compiler.launcher(kernel, 3, numbers, (_THREADS, 1))
    with torch.cuda.device(logits.device):
        stream = raw_stream()(logits.get_device())
        launch(len(logits), stream, *(each.data_ptr() for each in (losses, logits, target)))


def _values(dtype: Any, size: int) -> int:
    """How many values the kernel reads at once."""
    values = _BYTES // int(dtype.itemsize)
    return values if size % values == 0 else 1


def _compared(device: Any, dtype: Any, values: int) -> compiler.Kernel:
    """The compiled kernel."""
    import torch

    constants = {"INPUT": dtypes()[dtype], "VALUES": values}
    kernel = compiler.compiled(_FILE, "token_loss", device, **constants)
    size = (_THREADS + 37) * values
    logits = 8 * pattern((4, size), dtype, device)
    target = torch.tensor([5, -100, size - 1, size // 2], device=device)
    for cap in (0.0, 30.0):
        losses, gradients = torch.empty(4, device=device, dtype=torch.float32), logits.clone()
        _launch(kernel, losses, gradients, target, cap, -100)
        theirs = _by_pytorch(logits, target, cap, -100)
        exact = _by_pytorch(logits.double(), target, cap, -100)
        for compared in zip((losses, gradients), theirs, exact, strict=True):
            require_near(*compared)
    return kernel


def _by_pytorch(logits: Any, target: Any, cap: float, ignored: int) -> tuple[Any, Any]:
    """The losses of rows, and the gradients of the logits; each step in the dtype of PyTorch's."""
    import torch

    tangent = torch.tanh(logits / cap) if cap else None
    values = logits if tangent is None else tangent * cap
    logarithms = values.to(torch.promote_types(values.dtype, torch.float32)).log_softmax(-1)
    kept = (target != ignored)[:, None]
    places = torch.where(kept, target[:, None], 0)
    chosen = torch.arange(logits.shape[1], device=logits.device) == places
    gradients = (logarithms.exp() - chosen.to(logarithms.dtype)).masked_fill_(~kept, 0)
    gradients = gradients.to(logits.dtype)
    if tangent is not None:
        gradients = torch.ops.aten.tanh_backward(gradients * cap, tangent) / cap
    return -logarithms.gather(1, places).masked_fill(~kept, 0)[:, 0], gradients
