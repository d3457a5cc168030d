"""The replacement of ``rotary_kernels`` and of the same patch for other model types."""

from __future__ import annotations

from ...engine import Finding, Patch, drifted, fixed_if
from ...runtime.kernels.rotary import in_one_kernel
from .._code import code_at

_NAME = "apply_rotary_pos_emb"
#: The names that its code uses.
_USED = {"unsqueeze", "rotate_half"}


def mend(patch: Patch, module: str) -> None:
    """Register the probe and the replacement for a module's function."""

    @patch.probe
    def it_has_many_kernels() -> Finding:
        """The values are compared at the first call."""
        code = code_at(module, _NAME)
        arguments = code.co_varnames[: code.co_argcount]
        if arguments != ("x", "cos", "sin", "unsqueeze_dim"):
            return drifted(f"{_NAME} has the arguments {', '.join(arguments)}")
        return fixed_if({*code.co_names} != _USED, f"{_NAME} has other kernels")

    patch.replaces(module, _NAME)(in_one_kernel)
