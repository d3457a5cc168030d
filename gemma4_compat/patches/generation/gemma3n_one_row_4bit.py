"""4-bit models of Gemma 3n multiply slowly with the row of inputs that one token has.

This is the same as in Gemma 4 (see ``one_row_4bit``).

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._one_row_4bit import mend

PATCH = Patch(
    name="gemma3n_one_row_4bit",
    kind=Kind.SPEED,
    symptom=(
        "Gemma 3n: half of the time of a decode step goes into the 4-bit products of one token"
    ),
    affects=("transformers", "bitsandbytes"),
    changes=(
        "In forwards of Gemma 3n's text model with one token, 4-bit layers on a GPU multiply in a "
        "faster and more exact kernel."
    ),
    unreported="bitsandbytes' kernels are right, and not made for layers this small.",
)

mend(PATCH, "transformers.models.gemma3n.modeling_gemma3n", "Gemma3nTextModel")
