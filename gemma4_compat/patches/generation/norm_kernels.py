"""An RMS norm has nine kernels, and a token has hundreds of norms.

transformers computes it in float32.  It converts, squares, averages, adds, takes the root,
multiplies twice and converts back, each in a kernel of its own.  E2B has 242 norms for each token.
So two thirds of the kernels of a decode step belong to norms, and the GPU waits for the CPU that
launches them.  For a long prompt the GPU reads and writes all hidden states nine times.  In QLoRA
of E2B, norms and their gradients are two fifths of the kernels of a step.

The fix computes a norm in one kernel, with the same bits: it adds in PyTorch's order, and is
compared with the original at the first call.  The gradient of a norm in 16 bits whose weight is
frozen has another kernel.  See ``runtime/kernels/rms_norm.py`` and ``rms_norm_gradient.py``.
"""

from __future__ import annotations

from ...engine import Finding, Kind, Part, Patch, drifted, fixed_if
from ...engine.probing import code_at, mentions
from ...runtime.kernels.rms_norm import in_one_kernel
from .._families import FAMILIES, Family, former

PATCH = Patch(
    name="norm_kernels",
    kind=Kind.EXACT,
    symptom=(
        "generate is slow on a GPU: a token of E2B launches 3,400 kernels, 2,200 of them for norms"
    ),
    affects=(),
    unreported="The code is right as it is.",
    former=former("norm_kernels"),
    differs="second derivatives (create_graph=True) round some sums in another order",
)


def mend(part: Part, family: Family) -> None:
    """Register the probe and the replacement for the class of a family's RMS norms."""
    module, norm = family.module, f"{family.prefix}RMSNorm"

    @part.probe
    def a_norm_has_many_kernels() -> Finding:
        """The values of a norm are compared at its first call."""
        code = code_at(module, f"{norm}.forward")
        missing = {"_norm", "with_scale", "weight"} - {*code.co_names}
        fused = mentions(code, "rms_norm") or mentions(code_at(module, f"{norm}._norm"), "rms_norm")
        if missing and not fused:
            return drifted(f"{norm}.forward does not use {', '.join(sorted(missing))}")
        return fixed_if(fused, "PyTorch computes a norm in one kernel")

    part.replaces(module, f"{norm}.forward")(in_one_kernel)


for each in FAMILIES:
    mend(PATCH.part(each.name, each.requirement), each)
