"""The replacement of ``norm_kernels`` and of the same patch for other model types."""

from __future__ import annotations

from ...engine import Finding, Patch, drifted, fixed_if
from ...runtime.kernels.rms_norm import in_one_kernel
from .._code import code_at, mentions


def mend(patch: Patch, module: str, name: str) -> None:
    """Register the probe and the replacement for the class of a model's RMS norms."""

    @patch.probe
    def a_norm_has_many_kernels() -> Finding:
        """The values of a norm are compared at its first call."""
        code = code_at(module, f"{name}.forward")
        missing = {"_norm", "with_scale", "weight"} - {*code.co_names}
        fused = mentions(code, "rms_norm") or mentions(code_at(module, f"{name}._norm"), "rms_norm")
        if missing and not fused:
            return drifted(f"{name}.forward does not use {', '.join(sorted(missing))}")
        return fixed_if(fused, "PyTorch computes a norm in one kernel")

    patch.replaces(module, f"{name}.forward")(in_one_kernel)
