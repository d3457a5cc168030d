"""A training step of Gemma 3n keeps many copies of the logits.

This is the same as in Gemma 4 (see ``loss_memory``): its head has 262,400 entries.

The fix is the same, too.
"""

from __future__ import annotations

from .._families import GEMMA3N
from ._loss_memory import patch_of

PATCH = patch_of(
    GEMMA3N,
    name="gemma3n_loss_memory",
    symptom="Gemma 3n: torch.OutOfMemoryError in the loss of a training step",
    unreported="No report about this model is known upstream.",
)
