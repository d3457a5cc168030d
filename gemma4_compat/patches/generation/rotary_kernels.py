"""A rotary embedding has five kernels, and there are two in each layer.

For queries and for keys of each layer, transformers multiplies twice, negates, concatenates and
adds, each in a kernel of its own.  These are 250 kernels and 200 views for each token of E2B, and
the GPU waits for the CPU that launches them.

The fix does the same in one kernel if no gradients are needed, with the same bits.  See
``runtime/kernels/rotary.py``.
"""

from __future__ import annotations

from ...engine import Finding, Kind, Part, Patch, drifted, fixed_if
from ...engine.probing import code_at
from ...runtime.kernels.rotary import in_one_kernel
from .._families import FAMILIES, Family, former

PATCH = Patch(
    name="rotary_kernels",
    kind=Kind.EXACT,
    symptom="generate is slow on a GPU: rotary embeddings of E2B launch 250 kernels for a token",
    affects=("transformers>=5.11",),
    note=(
        "Releases before 5.11 keep a reference to the function itself, for kernels of the Hub, "
        "so it is not replaced there."
    ),
    unreported="The code is right as it is.",
    former=former("rotary_kernels"),
)

_NAME = "apply_rotary_pos_emb"
#: The names that its code uses.
_USED = {"unsqueeze", "rotate_half"}


def mend(part: Part, family: Family) -> None:
    """Register the probe and the replacement for the function of a family's module."""

    @part.probe
    def it_has_many_kernels() -> Finding:
        """The values are compared at the first call."""
        code = code_at(family.module, _NAME)
        arguments = code.co_varnames[: code.co_argcount]
        if arguments != ("x", "cos", "sin", "unsqueeze_dim"):
            return drifted(f"{_NAME} has the arguments {', '.join(arguments)}")
        return fixed_if({*code.co_names} != _USED, f"{_NAME} has other kernels")

    part.replaces(family.module, _NAME)(in_one_kernel)


for each in FAMILIES:
    mend(PATCH.part(each.name), each)
