"""4-bit models of Gemma 3n multiply slowly with the row of inputs that one token has.

This is the same as in Gemma 4 (see ``one_row_4bit``).

The fix is the same, too.
"""

from __future__ import annotations

from .._families import GEMMA3N
from ._one_row_4bit import patch_of

PATCH = patch_of(
    GEMMA3N,
    name="gemma3n_one_row_4bit",
    symptom=(
        "Gemma 3n: half of the time of a decode step goes into the 4-bit products of one token"
    ),
)
