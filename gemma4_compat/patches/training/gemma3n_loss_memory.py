"""A training step of Gemma 3n keeps many copies of the logits.

This is the same as in Gemma 4 (see ``loss_memory``): its head has 262,400 entries.

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._loss_memory import mend

PATCH = Patch(
    name="gemma3n_loss_memory",
    symptom="Gemma 3n: torch.OutOfMemoryError in the loss of a training step",
    affects=("transformers", "accelerate"),
    changes=(
        "A forward of Gemma 3n with labels computes logits and loss for some tokens at a time.  "
        "outputs.logits is computed when it is read."
    ),
    kind=Kind.SPEED,
    unreported="No report about this model is known upstream.",
)

mend(PATCH, "transformers.models.gemma3n.modeling_gemma3n", "Gemma3n")
