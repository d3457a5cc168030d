"""An RMS norm of Gemma 3n has nine kernels, and a token has hundreds of norms.

This is the same as in Gemma 4 (see ``norm_kernels``).

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._norms import mend

PATCH = Patch(
    name="gemma3n_norm_kernels",
    kind=Kind.SPEED,
    symptom="Gemma 3n: generate is slow on a GPU, because each norm launches nine kernels",
    affects=("transformers",),
    changes=(
        "On a GPU and without gradients, an RMS norm of Gemma 3n runs in one kernel, "
        "which was compared with those of transformers."
    ),
    unreported="The code is right as it is.",
)

mend(PATCH, "transformers.models.gemma3n.modeling_gemma3n", "Gemma3nRMSNorm")
