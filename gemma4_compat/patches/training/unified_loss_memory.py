"""A training step of Gemma 4 unified keeps many copies of the logits.

This is the same as in Gemma 4 (see ``loss_memory``): its head has 262,144 entries.

The fix is the same, too.
"""

from __future__ import annotations

from .._families import UNIFIED
from ._loss_memory import patch_of

PATCH = patch_of(
    UNIFIED,
    name="unified_loss_memory",
    symptom="Gemma 4 unified: torch.OutOfMemoryError in the loss of a training step",
    links=("https://github.com/linkedin/Liger-Kernel/issues/1308",),
)
