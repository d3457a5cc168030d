"""Reentrant gradient checkpointing corrupts the gradients of layers whose keys are shared.

The last layers of Gemma 4 attend to keys and values that earlier layers left in a dict.  Reentrant
checkpointing runs a layer without recording a graph, so what it leaves there has none, and only
tensors that a layer is *called* with are differentiated when it is run again.  Whatever flows back
through the shared keys and values is lost: the loss is right, the gradients of the layers that
made them, and of all layers below, are not.  Non-reentrant checkpointing records the graph.

Nobody has to ask for it.  transformers' own default is non-reentrant, but PEFT's
``prepare_model_for_kbit_training(model)`` passes empty ``gradient_checkpointing_kwargs``, and then
torch's default decides, which is reentrant.

The fix stands where every model is told which function checkpoints it.  Models that share keys and
values, Gemma 3n among them, get the non-reentrant variant; all others keep what they were given.
"""

from __future__ import annotations

import logging
from functools import partial, wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._code import mentions

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="reentrant_checkpointing",
    symptom=(
        "wrong gradients, without an error, under use_reentrant=True or after "
        "prepare_model_for_kbit_training(model)"
    ),
    affects=("transformers",),
    changes=(
        "Gradient checkpointing of models with KV-shared layers is non-reentrant.  A warning says "
        "so where use_reentrant=True was asked for, an INFO line where nothing was said."
    ),
    unreported="Reported only in another project (unsloth-zoo #813).",
)

#: Where the functions live of which transformers makes the partial that a model is given.
_CHECKPOINT_MODULES = ("torch.utils.checkpoint", "transformers.modeling_utils")


@PATCH.probe
def models_are_given_a_checkpoint_function() -> Finding:
    """Look whether a model gets the function that checkpoints it, unchanged."""
    import inspect

    from transformers.modeling_utils import PreTrainedModel

    method = PreTrainedModel._set_gradient_checkpointing
    if "gradient_checkpointing_func" not in inspect.signature(method).parameters:
        return drifted("_set_gradient_checkpointing takes no gradient_checkpointing_func")
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is not None and (mentions(code, "reentrant") or mentions(code, "kv_shared")):
        return fixed("_set_gradient_checkpointing chooses the variant itself")
    return broken()


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._set_gradient_checkpointing")
def set_gradient_checkpointing(original: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    @wraps(original)
    def _set_gradient_checkpointing(
        self: Any,
        enable: bool = True,
        gradient_checkpointing_func: Any = checkpoint,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if enable and _is_reentrant(gradient_checkpointing_func) and _shares_keys(self):
            given = getattr(gradient_checkpointing_func, "keywords", {})
            logger.log(
                logging.WARNING if given.get("use_reentrant") else logging.INFO,
                "gradient checkpointing of %s uses use_reentrant=False: its layers share keys and "
                "values, whose gradients use_reentrant=True, %s, would lose",
                type(self).__name__,
                "as asked for" if given.get("use_reentrant") else "torch's default",
            )
            gradient_checkpointing_func = partial(gradient_checkpointing_func, use_reentrant=False)
        return original(self, enable, gradient_checkpointing_func, *args, **kwargs)

    return _set_gradient_checkpointing


def _is_reentrant(function: Any) -> bool:
    """Whether it calls torch's checkpoint with ``use_reentrant=True``, or leaves it to torch."""
    given = getattr(function, "keywords", {}).get("use_reentrant")
    if given is not None:
        return bool(given)
    function = getattr(function, "func", function)
    return getattr(function, "__module__", None) in _CHECKPOINT_MODULES


def _shares_keys(model: Any) -> bool:
    return any(getattr(module, "is_kv_shared_layer", False) for module in model.modules())
