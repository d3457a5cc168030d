"""A training step of Gemma 4 unified keeps many copies of the logits.

This is the same as in Gemma 4 (see ``loss_memory``): its head has 262,144 entries.

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._loss_memory import mend

PATCH = Patch(
    name="unified_loss_memory",
    symptom="Gemma 4 unified: torch.OutOfMemoryError in the loss of a training step",
    affects=("transformers>=5.10", "accelerate"),
    changes=(
        "A forward of Gemma 4 unified with labels computes logits and loss for some tokens at a "
        "time.  outputs.logits is computed when it is read."
    ),
    kind=Kind.SPEED,
    links=("https://github.com/linkedin/Liger-Kernel/issues/1308",),
)

mend(PATCH, "transformers.models.gemma4_unified.modeling_gemma4_unified", "Gemma4Unified")
