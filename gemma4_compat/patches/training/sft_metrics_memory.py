"""TRL's ``SFTTrainer`` reads all logits for its metrics.

After each step, ``SFTTrainer.compute_loss`` computes entropy and accuracy of ``outputs.logits``.
``loss_memory`` has not computed these logits: read once, they take 262,144 entries a token, and the
copy without the last token of each row takes as much.

The fix gives these metrics rows of the logits, each computed when it is read.  What a loss function
or a label smoother gets, and the output that ``compute_loss`` returns, have tensors as before.
From TRL 1.16 on, ``SFTTrainer`` computes its metrics without the logits.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Kind, Patch, broken, drifted, fixed
from ...runtime import logits
from .._code import code_at, is_named

PATCH = Patch(
    name="sft_metrics_memory",
    symptom="torch.OutOfMemoryError in entropy_from_logits or argmax of TRL's SFTTrainer",
    affects=("transformers", "trl<1.16"),
    changes=(
        "SFTTrainer of TRL computes entropy and accuracy from rows of the logits, where "
        "loss_memory is at work."
    ),
    kind=Kind.SPEED,
    unreported="It shows with loss_memory; TRL 1.16 has another way to compute its metrics.",
)

_TRL = "trl.trainer.sft_trainer"


@PATCH.probe
def metrics_read_all_logits() -> Finding:
    """Look for the operations that rows of logits know."""
    code = code_at(_TRL, "SFTTrainer.compute_loss")
    if not is_named(code, "entropy_from_logits"):
        return fixed("SFTTrainer computes its metrics without logits")
    known = all(is_named(code, name) for name in ("contiguous", "argmax"))
    return broken() if known and not is_named(code, "isinstance") else drifted("it reads otherwise")


@PATCH.around(_TRL, "SFTTrainer.compute_loss")
def sft_loss(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with logits.in_rows():
        return original(self, *args, **kwargs)


@PATCH.around("transformers.trainer", "Trainer.compute_loss")
def loss(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    logits.for_rows(result[1] if isinstance(result, tuple) and len(result) == 2 else None)
    return result
