"""Gradient accumulation gives each micro batch the same weight, however many tokens it has.

A step over several micro batches equals a step over all of them as one batch only if their losses
are sums, divided by the number of tokens of the whole step.  ``Trainer`` counts these tokens and
passes the number to the model as ``num_items_in_batch``; the models' loss divides by it.  But
``Gemma4ForConditionalGeneration``, ``Gemma4UnifiedForConditionalGeneration`` and
``Gemma3nForConditionalGeneration`` declare ``accepts_loss_kwargs = False``, a copy from PaliGemma,
which had another loss.  So ``Trainer`` does not pass the number, and averages the means of the
micro batches: a token in a short micro batch counts more than a token in a long one.  There is no
error, but the gradients are wrong.

Before transformers 5.10.1 ``Trainer`` also counts the first label of each row, which is not a
target of the loss.  In transformers 5.5 the forward ignores the number: see
``gradient_accumulation_loss``.

The fix makes ``Trainer`` pass the number to these models and count the targets of their loss.
Nothing changes if the number would not reach the loss: a subclass or an instance that sets
``accepts_loss_kwargs`` or has a ``forward`` without ``num_items_in_batch``, a trainer whose own
``compute_loss`` does not use it (a warning says so), and label smoothing before transformers 5.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from inspect import unwrap
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._loss import arrives, is_declared_by, known_class, with_predicted_labels

PATCH = Patch(
    name="gradient_accumulation",
    symptom=(
        "with gradient_accumulation_steps, tokens in short micro batches count more than tokens in "
        "long ones, without an error"
    ),
    affects=("transformers",),
    changes=(
        "Trainer passes num_items_in_batch to Gemma4ForConditionalGeneration, "
        "Gemma4UnifiedForConditionalGeneration and Gemma3nForConditionalGeneration, and counts the "
        "labels that their loss uses."
    ),
    unreported=(
        "No report about these models is known upstream; transformers #37766 is about others."
    ),
)

_FLAG = "accepts_loss_kwargs"


@PATCH.probe
def trainer_asks_the_model() -> Finding:
    """Check whether Trainer reads the model's flag; the model class may not be imported yet."""
    from transformers.trainer import Trainer

    names = unwrap(Trainer.__init__).__code__.co_names
    if _FLAG not in (*names, *unwrap(Trainer.__init__).__code__.co_consts):
        return fixed("Trainer does not read accepts_loss_kwargs of models")
    if f"model_{_FLAG}" not in names:
        return drifted("Trainer does not store accepts_loss_kwargs as model_accepts_loss_kwargs")
    return broken()


@PATCH.replaces("transformers.trainer", "Trainer.__init__")
def trainer_init(original: Any) -> Any:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not self.model_accepts_loss_kwargs:
            known = known_class(self)
            if known is not None and is_declared_by(self, known):
                self.model_accepts_loss_kwargs = arrives(self)

    return __init__


@PATCH.replaces(
    "transformers.trainer", "Trainer._get_num_items_in_batch", when="transformers<5.10.1"
)
def get_num_items_in_batch(original: Any) -> Any:
    @wraps(original)
    def _get_num_items_in_batch(self: Any, batch_samples: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            known = known_class(self)
            are_labelled = all(isinstance(b, Mapping) and "labels" in b for b in batch_samples)
            if known is not None and are_labelled:
                batch_samples = [with_predicted_labels(b, known) for b in batch_samples]
        return original(self, batch_samples, *args, **kwargs)

    return _get_num_items_in_batch
