"""The loss of Gemma 3n in transformers 5.5 ignores the number of tokens of the whole step.

This is the same bug as in Gemma 4 (see ``gradient_accumulation_loss``): the forward computes the
mean over its micro batch, and ``Trainer`` treats it as a sum divided by ``num_items_in_batch``.

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Finding, Patch
from .._loss import probe, with_number, without_second_division

PATCH = Patch(
    name="gemma3n_accumulation_loss",
    symptom=(
        "Gemma 3n: with gradient_accumulation_steps, gradients are too large, and tokens in short "
        "micro batches count more than tokens in long ones, without an error"
    ),
    affects=("transformers<5.6",),
    requires=("gradient_accumulation",),
    changes=(
        "Gemma3nForConditionalGeneration.forward divides its loss by num_items_in_batch.  Before "
        "transformers 5.5.4, the patch also stops accelerate from dividing this loss by the number "
        "of micro batches."
    ),
    unreported=("Found by the tests of this package; no report is known upstream."),
)

_MODEL = "transformers.models.gemma3n.modeling_gemma3n"


@PATCH.probe
def forward_computes_a_mean() -> Finding:
    """Check how the forward computes its loss."""
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nForConditionalGeneration

    return probe(Gemma3nForConditionalGeneration)


PATCH.replaces(_MODEL, "Gemma3nForConditionalGeneration.forward")(with_number)
PATCH.replaces("transformers.trainer", "Trainer.__init__", when="transformers<5.5.4")(
    without_second_division("Gemma3nForConditionalGeneration")
)
