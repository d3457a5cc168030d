"""The loss of transformers 5.5 ignores the number of tokens of the whole step.

In this release ``Gemma4ForConditionalGeneration.forward`` always computes the mean over its micro
batch.  The class does not declare that it ignores ``num_items_in_batch``, so ``Trainer`` passes the
number and treats the loss as divided by it.  transformers 5.5.4 adds up the means of the micro
batches: with ``gradient_accumulation_steps=8`` the gradients are eight times too large.  In earlier
releases accelerate divides each loss by the number of micro batches, so their means are averaged.
In both cases, tokens in short micro batches count more than tokens in long ones.

The fix divides the sum of the losses by ``num_items_in_batch``, if the forward gets this argument.
It uses the loss function of transformers 5.6 and stops the division by accelerate.  The loss leaves
out padding, as before.
"""

from __future__ import annotations

from ...engine import Finding, Patch
from .._loss import probe, with_number, without_second_division

PATCH = Patch(
    name="gradient_accumulation_loss",
    symptom=(
        "with gradient_accumulation_steps, gradients are too large, and tokens in short micro "
        "batches count more than tokens in long ones, without an error"
    ),
    affects=("transformers<5.6",),
    requires=("gradient_accumulation",),
    changes=(
        "Gemma4ForConditionalGeneration.forward divides its loss by num_items_in_batch.  Before "
        "transformers 5.5.4, the patch also stops accelerate from dividing this loss by the number "
        "of micro batches."
    ),
    unreported=("Found by the tests of this package; no report is known upstream."),
)

_MODEL = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def forward_computes_a_mean() -> Finding:
    """Check how the forward computes its loss."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4ForConditionalGeneration

    return probe(Gemma4ForConditionalGeneration)


PATCH.replaces(_MODEL, "Gemma4ForConditionalGeneration.forward")(with_number)
PATCH.replaces("transformers.trainer", "Trainer.__init__", when="transformers<5.5.4")(
    without_second_division("Gemma4ForConditionalGeneration")
)
