"""4-bit models of Gemma 4 unified multiply slowly with the row of inputs that one token has.

This is the same as in Gemma 4 (see ``one_row_4bit``).

The fix is the same, too.
"""

from __future__ import annotations

from .._families import UNIFIED
from ._one_row_4bit import patch_of

PATCH = patch_of(
    UNIFIED,
    name="unified_one_row_4bit",
    symptom=(
        "Gemma 4 unified: half of the time of a decode step goes into the 4-bit products of one "
        "token"
    ),
)
