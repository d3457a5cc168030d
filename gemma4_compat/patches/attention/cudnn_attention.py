"""cuDNN's attention gives NaN gradients on H100 and H200.

PyTorch prefers cuDNN's attention there since 2.11.  With an explicit mask, and if the number of
keys is 64 modulo 128, its backward scores the missing half of the last 128 keys as 0 instead of
-inf.  Where all scores of a query are low, ``exp(0 - logsumexp)`` overflows, and the gradient of
the query is NaN.  Gemma 4 does not scale its scores, so they can be low.  Its masks are explicit if
a batch is padded, has images, or is longer than the sliding window.

The fix computes such attention without cuDNN if a gradient is needed, and only if cuDNN is wrong on
this GPU: a small example decides, once.  On GPUs of compute capability 10, cuDNN also decodes wrong
values.  PyTorch's own fix does not use cuDNN for a single query there, and neither does this one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...engine import Finding, Part, Patch, drifted, fixed_if
from ...engine.probing import code_at, mentions
from ...runtime.capture.cudnn import is_allowed, without_cudnn
from .._families import FAMILIES, GEMMA4, Family, former

PATCH = Patch(
    name="cudnn_attention",
    symptom="grad_norm is nan on an H100 or H200, if the length of a batch is 64 modulo 128",
    affects=(),
    note=(
        "The bug is in PyTorch 2.11 and later, with the cuDNN that it brings.  Compute capability "
        "10 (B200) was not measured."
    ),
    links=(
        "https://github.com/pytorch/pytorch/issues/196678",
        "https://github.com/pytorch/pytorch/issues/193893",
        "https://github.com/NVIDIA-NeMo/Automodel/issues/2208",
    ),
    former=former("cudnn_attention"),
    differs="training rounds as without cuDNN, whose gradients are NaN for some lengths",
)

_SDPA = "transformers.integrations.sdpa_attention"
#: The backward reads keys in blocks of the first number, and is wrong if the second remains.
_BLOCK, _REMAINDER = 128, 64
#: The first cuDNN that decodes wrong values on GPUs of compute capability 10.
_DECODES_WRONG = 91900
#: device, dtype and head size of an example -> whether it is wrong
_wrong: dict[tuple[Any, Any, int], bool] = {}
#: device -> whether it decodes wrong values
_decoding: dict[Any, bool] = {}


def mend(part: Part, family: Family) -> None:
    """Register the probe and the replacements for a family's attention classes."""
    kinds = ("Text", "Vision") if family is GEMMA4 else ("Text",)
    classes = [f"{family.prefix}{kind}Attention" for kind in kinds]

    @part.probe
    def pytorch_chooses_the_kernel() -> Finding:
        """PyTorch is examined at the first call."""
        for each in classes:
            if "attention_mask" not in code_at(family.module, f"{each}.forward").co_varnames:
                return drifted(f"{each} gets no attention_mask")
        chosen = mentions(code_at(_SDPA, "sdpa_attention_forward"), "cudnn")
        return fixed_if(chosen, "transformers chooses the kernel")

    for each in classes:
        part.around(family.module, f"{each}.forward")(_forward)


def _forward(
    original: Any, self: Any, hidden_states: Any, position_embeddings: Any = None,
    attention_mask: Any = None, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    inputs = (self, hidden_states, position_embeddings, attention_mask)
    if not hidden_states.is_cuda or not _is_wrong(self, hidden_states, attention_mask):
        return original(*inputs, *args, **kwargs)
    with _without_cudnn():
        return original(*inputs, *args, **kwargs)


def _is_wrong(module: Any, hidden_states: Any, mask: Any) -> bool:
    """Whether cuDNN would compute a wrong result, or wrong gradients, in this attention layer."""
    import torch

    if hidden_states.shape[1] == 1 and _decodes_wrong(hidden_states.device):
        return True
    if mask is None or mask.shape[-1] % _BLOCK != _REMAINDER:
        return False
    # A reentrant checkpoint first runs without gradients.
    if not (torch.is_grad_enabled() or module.training):
        return False
    if not _may_be_wrong(module, hidden_states):
        return False
    needed = hidden_states.requires_grad or any(each.requires_grad for each in module.parameters())
    return needed and torch.is_grad_enabled()


def _may_be_wrong(module: Any, hidden_states: Any) -> bool:
    """Whether the example is wrong.  Where it cannot run, it counts as wrong."""
    import torch

    if torch.compiler.is_compiling():
        return True
    if not is_allowed():
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else hidden_states.dtype
    example = (hidden_states.device, dtype, module.head_dim)
    if example not in _wrong:
        # In a backward, the example's own backward would wait for it.
        if getattr(torch._C, "_current_graph_task_id", lambda: None)() != -1:
            return True
        # Autocast, hooks for saved tensors and other modes of a forward belong to its thread.
        with ThreadPoolExecutor(1) as thread:
            _wrong[example] = thread.submit(_has_wrong_gradients, *example).result()
    return _wrong[example]


def _decodes_wrong(device: Any) -> bool:
    import torch

    if device not in _decoding:
        new = torch.cuda.is_available() and (torch.backends.cudnn.version() or 0) >= _DECODES_WRONG
        _decoding[device] = new and torch.cuda.get_device_capability(device)[0] == 10
    return _decoding[device]


# torch.compile cannot trace the version of cuDNN, so it calls this function.  The decorator
# torch.compiler.assume_constant_result sets the same attribute, but imports torch.
_decodes_wrong._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _has_wrong_gradients(device: Any, dtype: Any, head_size: int) -> bool:
    """Whether the gradients of queries with low scores are not finite on this GPU."""
    import torch

    values = torch.arange(_REMAINDER * head_size, device=device).sin().to(dtype)
    values = values.view(1, 1, _REMAINDER, head_size)
    queries = torch.zeros_like(values)
    queries[..., 0] = 1
    keys = -120 * queries
    mask = torch.ones(_REMAINDER, _REMAINDER, device=device, dtype=torch.bool).tril()
    attention = torch.nn.functional.scaled_dot_product_attention
    try:
        output = attention(queries.requires_grad_(), keys, values, attn_mask=mask, scale=1.0)
        [gradient] = torch.autograd.grad(output.float().square().sum(), queries)
    except RuntimeError:  # cuDNN cannot compute it
        return True
    return not bool(gradient.isfinite().all())


def _without_cudnn() -> Any:
    """A context in which PyTorch chooses another kernel than cuDNN's."""
    import torch

    if not torch.compiler.is_compiling():
        return without_cudnn()
    from torch.nn.attention import SDPBackend as Kernel
    from torch.nn.attention import sdpa_kernel

    return sdpa_kernel([Kernel.FLASH_ATTENTION, Kernel.EFFICIENT_ATTENTION, Kernel.MATH])


for each in FAMILIES:
    mend(PATCH.part(each.name, each.requirement), each)
