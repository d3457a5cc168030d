"""An RMS norm of Gemma 4 unified has nine kernels, and a token has hundreds of norms.

This is the same as in Gemma 4 (see ``norm_kernels``).

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._norms import mend

PATCH = Patch(
    name="unified_norm_kernels",
    kind=Kind.SPEED,
    symptom="Gemma 4 unified: generate is slow on a GPU, because each norm launches nine kernels",
    affects=("transformers>=5.10",),
    changes=(
        "On a GPU and without gradients, an RMS norm of Gemma 4 unified runs in one kernel, "
        "which was compared with those of transformers."
    ),
    unreported="The code is right as it is.",
)

mend(PATCH, "transformers.models.gemma4_unified.modeling_gemma4_unified", "Gemma4UnifiedRMSNorm")
