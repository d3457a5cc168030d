"""Reentrant gradient checkpointing corrupts the gradients of layers whose keys are shared.

The last layers of Gemma 4 attend to keys and values that earlier layers store in a dict.  Reentrant
checkpointing runs a layer without recording a graph, so the stored tensors have no graph.  When the
layer runs again, only its arguments are differentiated, so the gradient through the shared keys and
values is lost.  The loss is right, but the gradients of the layers that made them, and of all
layers below, are wrong.  Non-reentrant checkpointing records the graph.

This can happen without ``use_reentrant=True``.  transformers' default is non-reentrant, but PEFT's
``prepare_model_for_kbit_training(model)`` passes empty ``gradient_checkpointing_kwargs``, which
selects torch's default, reentrant.

The fix changes the function that transformers gives each model for its checkpoints.  Models that
share keys and values, including Gemma 3n, get the non-reentrant variant; all others get the same
function as before.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from .._code import code_of, mentions

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="reentrant_checkpointing",
    symptom=(
        "wrong gradients, without an error, with use_reentrant=True or after "
        "prepare_model_for_kbit_training(model)"
    ),
    affects=("transformers",),
    changes=(
        "Gradient checkpointing of models with KV-shared layers is non-reentrant.  A warning says "
        "so if use_reentrant=True was passed, an INFO line if use_reentrant was not passed."
    ),
    unreported="Reported only in another project (unsloth-zoo #813).",
)


@PATCH.probe
def models_are_given_a_checkpoint_function() -> Finding:
    """Check whether transformers passes the checkpoint function to the model unchanged."""
    from transformers.modeling_utils import PreTrainedModel

    method = PreTrainedModel._set_gradient_checkpointing
    if "gradient_checkpointing_func" not in inspect.signature(method).parameters:
        return drifted("_set_gradient_checkpointing takes no gradient_checkpointing_func")
    code = code_of(method)
    chooses = mentions(code, "reentrant") or mentions(code, "kv_shared")
    return fixed_if(chooses, "_set_gradient_checkpointing chooses the variant itself")


@PATCH.around("transformers.modeling_utils", "PreTrainedModel._set_gradient_checkpointing")
def set_gradient_checkpointing(
    original: Any,
    self: Any,
    enable: Any = True,
    gradient_checkpointing_func: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if enable and _is_reentrant(gradient_checkpointing_func) and _shares_keys(self):
        given = getattr(gradient_checkpointing_func, "keywords", {})
        logger.log(
            logging.WARNING if given.get("use_reentrant") else logging.INFO,
            "gradient checkpointing of %s uses use_reentrant=False.  Its layers share keys and "
            "values, whose gradients would be lost with use_reentrant=True (%s).",
            type(self).__name__,
            "your setting" if given.get("use_reentrant") else "torch's default",
        )
        gradient_checkpointing_func = partial(gradient_checkpointing_func, use_reentrant=False)
    return original(self, enable, gradient_checkpointing_func, *args, **kwargs)


def _is_reentrant(function: Any) -> bool:
    """Whether this is torch's checkpoint, or transformers' use of it, with ``use_reentrant=True``.

    True is torch's default.  A function of the user's stays as it is.
    """
    from torch.utils.checkpoint import checkpoint

    given = getattr(function, "keywords", {}).get("use_reentrant", True)
    function = getattr(function, "func", function)
    path = getattr(getattr(function, "__code__", None), "co_filename", "").replace("\\", "/")
    is_known = function is checkpoint or path.endswith("/transformers/modeling_utils.py")
    return is_known and given in (True, None)


def _shares_keys(model: Any) -> bool:
    return any(getattr(module, "is_kv_shared_layer", False) for module in model.modules())
