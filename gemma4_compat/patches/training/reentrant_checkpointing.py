"""Reentrant gradient checkpointing loses gradients of Gemma 4.

Reentrant checkpointing runs a layer without recording a graph.  When the layer runs again for the
backward pass, only its positional arguments are differentiated.  The loss is right, but gradients
are lost in two cases, without an error.

- **Shared keys.**  The last layers of E2B, E4B and Gemma 3n attend to keys and values that earlier
  layers store in a dict.  The stored tensors have no graph, so the gradients of the layers that
  made them, and of all layers below, are wrong.
- **No argument needs a gradient.**  Then torch does not run the layer again, and its trained
  weights, such as an adapter, get no gradient at all.  transformers' ``enable_input_require_grads``
  makes token embeddings need one.  It does so neither for the pixels that enter the vision tower
  nor for ``inputs_embeds``.  26B-A4B and 31B are affected.

This can happen without ``use_reentrant=True``.  transformers' default is non-reentrant, but PEFT's
``prepare_model_for_kbit_training(model)`` passes empty ``gradient_checkpointing_kwargs``, which
selects torch's default, reentrant.

The fix changes the function that transformers gives each model for its checkpoints.  Models that
share keys and values get the non-reentrant variant.  Other models of Gemma 4 and Gemma 3n keep the
variant: if a layer has trained weights and no argument needs a gradient, the first argument gets
``requires_grad=True``.  All other models get the same function as before.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from ...engine.probing import code_of, mentions
from ...model.parts import is_ours

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="reentrant_checkpointing",
    symptom=(
        "wrong or no gradients, without an error, with use_reentrant=True or after "
        "prepare_model_for_kbit_training(model); None of the inputs have requires_grad=True. "
        "Gradients will be None"
    ),
    affects=("transformers",),
    unreported=(
        "Reported only in another project (unsloth-zoo #813, unsloth #5039) and for other models "
        "(peft #2880)."
    ),
)


@PATCH.probe
def models_are_given_a_checkpoint_function() -> Finding:
    """Check whether transformers passes the checkpoint function to the model unchanged."""
    from transformers.modeling_utils import PreTrainedModel

    method = PreTrainedModel._set_gradient_checkpointing
    if "gradient_checkpointing_func" not in inspect.signature(method).parameters:
        return drifted("_set_gradient_checkpointing takes no gradient_checkpointing_func")
    code = code_of(method)
    # The names of a call's keyword arguments are in a tuple among the constants.
    chooses = mentions(code, "reentrant") or "reentrant" in str(code.co_consts)
    # A choice by shared keys does not mend the towers of models without them.
    chooses = chooses and not mentions(code, "kv_shared")
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
    if not enable or not _is_reentrant(gradient_checkpointing_func):
        return original(self, enable, gradient_checkpointing_func, *args, **kwargs)
    if _shares_keys(self):
        given = getattr(gradient_checkpointing_func, "keywords", {})
        logger.log(
            logging.WARNING if given.get("use_reentrant") else logging.INFO,
            "gradient checkpointing of %s uses use_reentrant=False.  Its layers share keys and "
            "values, whose gradients would be lost with use_reentrant=True (%s).",
            type(self).__name__,
            "your setting" if given.get("use_reentrant") else "torch's default",
        )
        gradient_checkpointing_func = partial(gradient_checkpointing_func, use_reentrant=False)
    elif any(is_ours(module) for module in self.modules()):
        gradient_checkpointing_func = partial(_checkpoint, gradient_checkpointing_func)
    return original(self, enable, gradient_checkpointing_func, *args, **kwargs)


def _checkpoint(given: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """``given(function, *args)``; an argument needs a gradient if the layer has trained weights."""
    import torch

    if (
        torch.is_grad_enabled()
        and isinstance(next(iter(args), None), torch.Tensor)
        and args[0].is_floating_point()
        and not any(getattr(each, "requires_grad", False) for each in args)
        and _is_trained(function)
    ):
        args = (args[0].detach().requires_grad_(), *args[1:])
    return given(function, *args, **kwargs)


def _is_trained(function: Any) -> bool:
    """Whether the layer of ``partial(layer.forward)`` or ``partial(forward, layer)`` is trained.

    FSDP hides the parameters of a layer that runs, so a layer without any counts as trained.
    """
    method = getattr(getattr(function, "func", function), "__self__", None)
    layers = (x for x in (method, *getattr(function, "args", ())) if hasattr(x, "parameters"))
    parameters = [each for layer in layers for each in layer.parameters()]
    return not parameters or any(parameter.requires_grad for parameter in parameters)


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
