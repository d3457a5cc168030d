"""TRL's ``SFTTrainer`` reads all logits for its metrics.

``SFTTrainer.compute_loss`` computes entropy and accuracy of ``outputs.logits``, which
``loss_memory`` has not computed: 262,144 entries a token, and as much for the last copy of them.

The fix gives these metrics logits that are computed some rows at a time.  A loss function, a label
smoother, and those who get the output of ``compute_loss`` read a tensor as before.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Kind, Patch, broken, drifted, fixed
from ...engine.probing import code_at, mentions
from ...runtime.loss.output import staying_lazy

PATCH = Patch(
    name="sft_metrics_memory",
    symptom="torch.OutOfMemoryError in entropy_from_logits or argmax of TRL's SFTTrainer",
    affects=("transformers", "trl<1.15"),
    kind=Kind.MEMORY,
    unreported="It shows with loss_memory; TRL 1.15 computes its metrics in another way.",
    differs="TRL's metrics are computed for some tokens at a time, and round so",
)


@PATCH.probe
def metrics_read_all_logits() -> Finding:
    """Look for the operations that lazy logits do in rows."""
    code = code_at("trl.trainer.sft_trainer", "SFTTrainer.compute_loss")
    if not mentions(code, "entropy_from_logits"):
        return fixed("SFTTrainer computes its metrics without logits")
    is_known = mentions(code, "argmax") and not mentions(code, "isinstance")
    return broken() if is_known else drifted("SFTTrainer computes other metrics of logits")


@PATCH.around("trl.trainer.sft_trainer", "SFTTrainer.compute_loss")
def sft_loss(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with staying_lazy():
        return original(self, *args, **kwargs)


@PATCH.around("transformers.trainer", "Trainer.compute_loss")
def loss(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Inside of SFTTrainer's: with the model's forward, and the user's loss function."""
    with staying_lazy(False):
        return original(self, *args, **kwargs)
