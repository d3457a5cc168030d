"""The patch ``norm_kernels`` for each family of models."""

from __future__ import annotations

from ...engine import Finding, Kind, Patch, drifted, fixed_if
from ...runtime.kernels.rms_norm import in_one_kernel
from .._code import code_at, mentions
from .._families import Family


def patch_of(family: Family, name: str, symptom: str) -> Patch:
    """The patch for the class of a family's RMS norms."""
    module, norm = family.module, f"{family.prefix}RMSNorm"
    patch = Patch(
        name=name,
        kind=Kind.EXACT,
        symptom=symptom,
        affects=(family.requirement,),
        changes=(
            f"On a GPU and without gradients, an RMS norm of {family.name} runs in one kernel, "
            "which was compared with those of transformers."
        ),
        unreported="The code is right as it is.",
    )

    @patch.probe
    def a_norm_has_many_kernels() -> Finding:
        """The values of a norm are compared at its first call."""
        code = code_at(module, f"{norm}.forward")
        missing = {"_norm", "with_scale", "weight"} - {*code.co_names}
        fused = mentions(code, "rms_norm") or mentions(code_at(module, f"{norm}._norm"), "rms_norm")
        if missing and not fused:
            return drifted(f"{norm}.forward does not use {', '.join(sorted(missing))}")
        return fixed_if(fused, "PyTorch computes a norm in one kernel")

    patch.replaces(module, f"{norm}.forward")(in_one_kernel)
    return patch
