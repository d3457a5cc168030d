"""The patch ``rotary_kernels`` for each family of models."""

from __future__ import annotations

from ...engine import Finding, Kind, Patch, drifted, fixed_if
from ...runtime.kernels.rotary import in_one_kernel
from .._code import code_at
from .._families import Family

_NAME = "apply_rotary_pos_emb"
#: The names that its code uses.
_USED = {"unsqueeze", "rotate_half"}


def patch_of(family: Family, name: str, symptom: str) -> Patch:
    """The patch for the function of a family's module."""
    patch = Patch(
        name=name,
        kind=Kind.EXACT,
        symptom=symptom,
        affects=("transformers>=5.11",),
        changes=(
            f"On a GPU and without gradients, rotary embeddings of {family.name} run in one "
            "kernel, which was compared with those of transformers."
        ),
        note=(
            "Releases before 5.11 keep a reference to the function itself, for kernels of the Hub, "
            "so it is not replaced there."
        ),
        unreported="The code is right as it is.",
    )

    @patch.probe
    def it_has_many_kernels() -> Finding:
        """The values are compared at the first call."""
        code = code_at(family.module, _NAME)
        arguments = code.co_varnames[: code.co_argcount]
        if arguments != ("x", "cos", "sin", "unsqueeze_dim"):
            return drifted(f"{_NAME} has the arguments {', '.join(arguments)}")
        return fixed_if({*code.co_names} != _USED, f"{_NAME} has other kernels")

    patch.replaces(family.module, _NAME)(in_one_kernel)
    return patch
