"""Training in float16 gives NaN gradients, although the loss is finite.

Decoder layers add to one hidden state, and each layer normalizes what it reads.  Where hidden
states are small, their gradients are large: the norm divides by their size.  In float16 they
overflow, and the gradients of all earlier layers become NaN.  The forward does not come near the
largest float16.  ``GradScaler`` skips such steps, so training seems to go on.

Where hidden states are large, products in float16 overflow as well, whatever the dtype of the
weights: the gate of the per-layer embeddings reads the hidden state as it is, and the last product
of an MLP reads a product of two others.  So float16 autocast is no way out.

This patch repairs nothing.  It warns at the first training step whose hidden states or products are
in float16, and says how to load the model instead: in bfloat16, products in 4 bits in float32.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_at, mentions

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="fp16_training_notice",
    kind=Kind.WARNING,
    symptom="float16 (T4, V100): grad_norm is nan although the loss is finite",
    affects=("transformers",),
    links=(
        "https://github.com/unslothai/unsloth-zoo/pull/866",
        "https://github.com/unslothai/unsloth/pull/5092",
    ),
)

_MODULE = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def hidden_states_have_the_dtype_of_the_model() -> Finding:
    """Check whether a decoder layer converts its hidden states."""
    code = code_at(_MODULE, "Gemma4TextDecoderLayer.forward")
    return fixed_if(mentions(code, "float"), "decoder layers add hidden states in float32")


@PATCH.around(_MODULE, "Gemma4TextModel.forward")
def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    kind = output[0].device.type
    if self.training and output[0].requires_grad and kind != "meta":
        import torch

        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        if torch.float16 in (output[0].dtype, cast) and not torch.compiler.is_compiling():
            _warn()
    return output


@lru_cache
def _warn() -> None:
    logger.warning(
        "Gemma 4 is training in float16.  Gradients can overflow, and then grad_norm is nan "
        "although the loss is finite.  Load the model with dtype=torch.bfloat16, and train with "
        "fp16=False.  On a GPU without bfloat16 (T4, V100), use "
        "bnb_4bit_compute_dtype=torch.float32 and bf16=False.  On other GPUs, use "
        "bnb_4bit_compute_dtype=torch.bfloat16 and bf16=True.  "
        "gemma4-compat plan MODEL --gpu T4 --train prints the code for a T4."
    )
