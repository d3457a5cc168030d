"""Loading fails for lack of a usable GPU or of memory, and the error does not say what to do.

``pip install torch`` on Windows installs a build without CUDA.  ``from_pretrained`` with a GPU in
the device map then raises ``Cannot access accelerator device when none is available``.  A model
that is too large raises an ``OutOfMemoryError``, which says how much memory one tensor lacked.

The patch leaves the error as it is, and adds a line: which build to install, or which command
prints a device map that fits.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from ...engine import Finding, Kind, Patch, broken, fixed
from ...model.parts import MODELS
from ...model.torch_build import cpu_only
from .._advice import advise
from .._code import mentions

PATCH = Patch(
    name="load_error_advice",
    kind=Kind.WARNING,
    symptom=(
        "RuntimeError: Cannot access accelerator device when none is available, or "
        "torch.OutOfMemoryError, in from_pretrained"
    ),
    affects=("transformers",),
    changes=(
        "If from_pretrained of a Gemma 4 or Gemma 3n model fails for lack of a GPU or of GPU "
        "memory, the error ends with a line that says what to do."
    ),
    unreported="The errors are right.  They only lack advice.",
)

#: how the errors of torch without a GPU begin, by release and build
_NO_GPU = ("Cannot access accelerator", "Torch not compiled with CUDA", "No CUDA GPUs", "Found no")


@PATCH.probe
def errors_have_no_advice() -> Finding:
    """Look whether from_pretrained adds notes to errors itself."""
    from transformers.modeling_utils import PreTrainedModel

    if mentions(inspect.unwrap(PreTrainedModel.from_pretrained).__code__, "add_note"):
        return fixed("from_pretrained gives advice")
    return broken()


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel.from_pretrained")
def from_pretrained(original: Any) -> Any:
    @wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(cls, *args, **kwargs)
        except (RuntimeError, AssertionError) as error:  # an OutOfMemoryError is a RuntimeError
            advice = _advice(error) if cls.__module__.startswith(MODELS) else ""
            if advice:
                advise(error, advice)
            raise

    return from_pretrained


def _advice(error: BaseException) -> str:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "to find a device map that fits, run gemma4-compat plan MODEL"
    if str(error).startswith(_NO_GPU):
        return cpu_only() or 'PyTorch sees no GPU; to load on the CPU, pass device_map={"": "cpu"}'
    return ""
