"""4-bit models multiply slowly with the row of inputs that one token has.

Each layer in 4 bits has one product in a step of one token.  bitsandbytes' kernel for one row takes
about 9 us for the small layers of E2B, whose bytes the memory sends in one.  Before 0.50, double
quantisation adds two kernels for the maxima of the blocks.  This is most of the time of a captured
step.

In such a forward of the text model, the fix uses a kernel of its own, see
``runtime/kernels/one_row_4bit.py``.  It is the same in eager and captured steps.  Its outputs are
not those of bitsandbytes bit for bit: they are closer to the exact product, because it rounds only
once.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._one_row_4bit import mend

PATCH = Patch(
    name="one_row_4bit",
    kind=Kind.SPEED,
    symptom="half of the time of a decode step goes into the 4-bit products of one token",
    affects=("transformers", "bitsandbytes"),
    changes=(
        "In forwards of Gemma 4's text model with one token, 4-bit layers on a GPU multiply in a "
        "faster and more exact kernel."
    ),
    unreported="bitsandbytes' kernels are right, and not made for layers this small.",
)

mend(PATCH, "transformers.models.gemma4.modeling_gemma4", "Gemma4TextModel")
