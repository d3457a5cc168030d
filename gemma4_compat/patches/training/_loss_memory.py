"""The patch ``loss_memory`` for each family of models."""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...runtime import logits
from .._code import code_at
from .._families import Family


def patch_of(
    family: Family, name: str, symptom: str, links: tuple[str, ...] = (), unreported: str = ""
) -> Patch:
    """The patch for a family's classes with a head."""
    module, prefix = family.module, family.prefix
    patch = Patch(
        name=name,
        symptom=symptom,
        affects=(family.requirement, "accelerate"),
        changes=(
            f"A forward of {family.name} with labels computes logits and loss for some tokens at a "
            "time.  outputs.logits is computed when it is read."
        ),
        kind=Kind.MEMORY,
        links=links,
        unreported=unreported,
    )

    @patch.probe
    def forward_computes_all_logits() -> Finding:
        code = code_at(module, f"{prefix}ForConditionalGeneration.forward")
        return fixed_if("lm_head" not in code.co_names, "the forward does not call lm_head")

    @patch.around(module, f"{prefix}ForConditionalGeneration.forward")
    @patch.around(module, f"{prefix}ForCausalLM.forward")
    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return logits.lazily(original, self, *args, **kwargs)

    @patch.around("accelerate.utils.operations", "convert_to_fp32")
    def convert_to_fp32(original: Any, tensor: Any) -> Any:
        return logits.in_float32(original, tensor)

    @patch.around("torch.nn.parallel.distributed", "_find_tensors")
    @patch.around("torch.nn.parallel.distributed", "_tree_flatten_with_rref")
    def in_ddp(original: Any, *args: Any, **kwargs: Any) -> Any:
        return logits.in_ddp(original, *args, **kwargs)

    return patch
