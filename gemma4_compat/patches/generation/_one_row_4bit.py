"""The patch ``one_row_4bit`` for each family of models."""

from __future__ import annotations

from ...engine import Finding, Kind, Patch, drifted, fixed_if
from ...runtime.capture.decoding import forget
from ...runtime.kernels.one_row_4bit import in_forward, matmul
from .._code import code_at, mentions
from .._families import Family


def patch_of(family: Family, name: str, symptom: str) -> Patch:
    """The patch for a family's text model."""
    patch = Patch(
        name=name,
        kind=Kind.FAST,
        symptom=symptom,
        affects=(family.requirement, "bitsandbytes"),
        changes=(
            f"In forwards of {family.name}'s text model with one token, 4-bit layers on a GPU "
            "multiply in a faster and more exact kernel."
        ),
        unreported="bitsandbytes' kernels are right, and not made for layers this small.",
    )

    @patch.probe
    def one_row_has_a_kernel_of_bitsandbytes() -> Finding:
        """Check that 4-bit layers call ``bitsandbytes.matmul_4bit``, and that it has a kernel."""
        if "matmul_4bit" not in code_at("bitsandbytes.nn.modules", "Linear4bit.forward").co_names:
            return drifted("Linear4bit.forward does not call bitsandbytes.matmul_4bit")
        code = code_at("bitsandbytes.autograd._functions", "matmul_4bit")
        has_kernel = mentions(code, "gemv_4bit") or mentions(code, "gemm_4bit")
        return fixed_if(not has_kernel, "matmul_4bit multiplies in another way")

    patch.on_revert(forget)
    patch.around(family.module, f"{family.prefix}TextModel.forward")(in_forward(patch))
    patch.around("bitsandbytes", "matmul_4bit")(matmul(patch))
    return patch
