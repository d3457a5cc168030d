"""The replacements of ``loss_memory`` and of the same patch for other model types."""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...runtime import logits
from .._code import code_at


def mend(patch: Patch, module: str, prefix: str) -> None:
    """Register probe and replacements for the classes with this prefix in a module."""

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
