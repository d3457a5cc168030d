"""The rotary embedding of Gemma 4 unified has five kernels, and runs twice in each layer.

This is the same as in Gemma 4 (see ``rotary_kernels``).

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._rotary import mend

PATCH = Patch(
    name="unified_rotary_kernels",
    kind=Kind.SPEED,
    symptom="Gemma 4 unified: generate is slow on a GPU: rotary embeddings launch many kernels",
    affects=("transformers>=5.11",),
    changes=(
        "On a GPU and without gradients, rotary embeddings of Gemma 4 unified run in one kernel, "
        "which was compared with those of transformers."
    ),
    note=(
        "Releases before 5.11 keep a reference to the function itself, for kernels of the Hub, so "
        "it is not replaced there."
    ),
    unreported="The code is right as it is.",
)

mend(PATCH, "transformers.models.gemma4_unified.modeling_gemma4_unified")
