"""The replacements of ``one_row_4bit`` and of the same patch for other model types."""

from __future__ import annotations

from ...engine import Finding, Patch, broken, drifted, fixed
from ...runtime.capture.decoding import forget
from ...runtime.kernels.one_row_4bit import in_forward, matmul
from .._code import code_at, mentions


def mend(patch: Patch, module: str, name: str) -> None:
    """Register probe and replacements for a class of text models."""

    @patch.probe
    def one_row_has_a_kernel_of_bitsandbytes() -> Finding:
        """Check that 4-bit layers call ``bitsandbytes.matmul_4bit``, and that it has a kernel."""
        if "matmul_4bit" not in code_at("bitsandbytes.nn.modules", "Linear4bit.forward").co_names:
            return drifted("Linear4bit.forward does not call bitsandbytes.matmul_4bit")
        code = code_at("bitsandbytes.autograd._functions", "matmul_4bit")
        if not (mentions(code, "gemv_4bit") or mentions(code, "gemm_4bit")):
            return fixed("matmul_4bit multiplies in another way")
        return broken()

    patch.on_revert(forget)
    patch.around(module, f"{name}.forward")(in_forward(patch))
    patch.around("bitsandbytes", "matmul_4bit")(matmul(patch))
