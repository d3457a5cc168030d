"""A training step of Gemma 4 keeps many copies of the logits, which have 262,144 entries a token.

With ``labels``, the forward computes all logits, then divides, ``tanh``, multiplies and converts
them to float32, and the cross entropy and its gradients are as large.  Together these are 14 bytes
for each entry: 7 GiB for 2,048 tokens, of the 9.6 GiB that a QLoRA step of E2B needs.  PyTorch's
``linear_cross_entropy`` and Liger's loss would not store them, but the first has no soft cap, and
the second needs Triton.

The fix computes head, soft cap, loss and gradient for some tokens at a time.  If the head is
trained, backward computes its gradient for some entries of the vocabulary at a time, and the logits
once more.  ``outputs.logits`` is computed when it is read.  The loss of each token comes from the
same operations.  If the head is adapted, offloaded or sharded, or has hooks, and if the model has
another loss function, everything stays as it is.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Kind, Part, Patch, fixed_if
from ...engine.probing import code_at
from ...runtime.loss import forward as lazy_forward
from ...runtime.loss import output
from .._families import FAMILIES, Family, former

PATCH = Patch(
    name="loss_memory",
    kind=Kind.MEMORY,
    symptom="torch.OutOfMemoryError in the loss of a training step, although the model is small",
    affects=("accelerate",),
    links=("https://github.com/linkedin/Liger-Kernel/issues/1308",),
    former=former("loss_memory"),
    differs="loss and gradients are computed for some tokens at a time, and round so",
)


def mend(part: Part, family: Family) -> None:
    """Register the probe and the replacements for a family's classes with a head."""
    module, prefix = family.module, family.prefix

    @part.probe
    def forward_computes_all_logits() -> Finding:
        code = code_at(module, f"{prefix}ForConditionalGeneration.forward")
        return fixed_if("lm_head" not in code.co_names, "the forward does not call lm_head")

    @part.around(module, f"{prefix}ForConditionalGeneration.forward")
    @part.around(module, f"{prefix}ForCausalLM.forward")
    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return lazy_forward.lazily(original, self, *args, **kwargs)


@PATCH.around("accelerate.utils.operations", "convert_to_fp32")
def convert_to_fp32(original: Any, tensor: Any) -> Any:
    return output.in_float32(original, tensor)


@PATCH.around("torch.nn.parallel.distributed", "_find_tensors")
@PATCH.around("torch.nn.parallel.distributed", "_tree_flatten_with_rref")
def in_ddp(original: Any, *args: Any, **kwargs: Any) -> Any:
    return output.in_ddp(original, *args, **kwargs)


for each in FAMILIES:
    mend(PATCH.part(each.name, each.requirement), each)
