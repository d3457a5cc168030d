"""4-bit models multiply slowly with the row of inputs that one token has.

Each layer in 4 bits has one product in a step of one token.  bitsandbytes' kernel for one row takes
about 9 us for the small layers of E2B, whose bytes the memory sends in one.  Before 0.50, double
quantization adds two kernels for the maxima of the blocks.  This is most of the time of a captured
step.

In such a forward of the text model, the fix uses a kernel of its own, see
``runtime/kernels/one_row_4bit.py``.  It is the same in eager and captured steps.  Its outputs are
not those of bitsandbytes bit for bit: they are closer to the exact product, because it rounds only
once.
"""

from __future__ import annotations

from .._families import GEMMA4
from ._one_row_4bit import patch_of

PATCH = patch_of(
    GEMMA4,
    name="one_row_4bit",
    symptom="half of the time of a decode step goes into the 4-bit products of one token",
)
