"""4-bit models of Gemma 4 unified multiply slowly with the row of inputs that one token has.

This is the same as in Gemma 4 (see ``one_row_4bit``).

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._one_row_4bit import mend

PATCH = Patch(
    name="unified_one_row_4bit",
    kind=Kind.SPEED,
    symptom=(
        "Gemma 4 unified: half of the time of a decode step goes into the 4-bit products of one "
        "token"
    ),
    affects=("transformers>=5.10", "bitsandbytes"),
    changes=(
        "In forwards of Gemma 4 unified's text model with one token, 4-bit layers on a GPU "
        "multiply in a faster and more exact kernel."
    ),
    unreported="bitsandbytes' kernels are right, and not made for layers this small.",
)

mend(
    PATCH,
    "transformers.models.gemma4_unified.modeling_gemma4_unified",
    "Gemma4UnifiedTextModel",
)
