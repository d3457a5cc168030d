"""The forward of a model with labels, whose logits are lazy if that changes nothing else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ...errors import ModelError
from ...objects import View
from .head import Head, Kept, rows_of
from .logits import LazyLogits
from .output import lazy

logger = logging.getLogger(__name__)

#: modules of the modes that change no values of the head: ``torch.device``, and that of ``plan``
_MODES = ("torch.utils._device", "gemma4_compat.planning.peak")
#: the errors of an operation that lazy logits do not know
_OURS = (AttributeError, RuntimeError, TypeError, ModelError)


class _Recorded(View):
    """A module that keeps its last output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._module(*args, **kwargs)
        vars(self)["output"] = output
        return output


def lazily(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a model with labels; its logits are lazy if that changes nothing else."""
    labels = kwargs.get("labels")
    if not hasattr(labels, "numel") or not _can_be_lazy(model, labels, kwargs):
        return original(model, *args, **kwargs)
    head = Head(_own_head(model.lm_head))
    kept = Kept(head)  # noqa: F841  (until the loss has it)
    backbone = _Recorded(model.model)

    def lazy_head(hidden: Any) -> LazyLogits:
        # A copy, as the hidden states are also in the output.
        return LazyLogits(hidden.clone(), head, late=head.copy())

    try:
        with_lazy_head = View(model, model=backbone, lm_head=lazy_head)
        output = original(with_lazy_head, *args, **kwargs)
        values = {each.name: getattr(output, each.name) for each in fields(output)}
        kind: Any = type(output)
        lazy_output = lazy(kind)(**values)
        lazy_output._kept = model._skip_keys_device_placement or ()
        return lazy_output
    except _OURS as error:
        # Not a subclass: these are for the callers, as those of a checkpoint around this forward.
        if "output" not in vars(backbone) or type(error) not in _OURS:
            raise
        logger.info("all logits of this step are computed: %s: %s", type(error).__name__, error)
        whole = View(model, model=lambda *args, **kwargs: backbone.output)
        return original(whole, *args, **kwargs)


def _own_head(head: Any) -> Any:
    """The copy of the head that PEFT's ``modules_to_save`` runs; another head itself."""
    from torch import nn

    kind = type(head)
    if (kind.__module__, kind.__name__) != ("peft.utils.other", "ModulesToSaveWrapper"):
        return head
    if "forward" in vars(head):
        return head
    name, *others = head.active_adapters or [None]
    if head.disable_adapters or others or name not in head.modules_to_save:
        return head
    own = head.modules_to_save[name]
    return own if type(own) is nn.Linear else head


def _hooks(module: Any) -> bool:
    hooks = (
        module._forward_hooks, module._forward_pre_hooks,
        module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks)


def _can_be_lazy(model: Any, labels: Any, kwargs: dict[str, Any]) -> bool:
    import torch
    from torch.nn.modules import module as modules
    from torch.overrides import _get_current_function_mode_stack
    from transformers.loss import loss_utils

    losses = loss_utils.__name__
    head = _own_head(model.lm_head)
    if type(head) is not torch.nn.Linear or type(head.weight) is not torch.nn.Parameter:
        return False
    forward = vars(head).get("_old_forward" if hasattr(head, "_hf_hook") else "forward")
    is_trained = any(each.requires_grad for each in head.parameters())
    special = (
        head.bias is not None,
        is_trained and hasattr(head, "_hf_hook"),
        head.weight.is_meta and hasattr(head, "_hf_hook"),  # offloaded
        forward is not None and getattr(forward, "__func__", None) is not type(head).forward,
        getattr(head, "_is_fsdp_managed_module", False),
        hasattr(head.weight, "ds_id"),  # DeepSpeed may take the weight away
        getattr(model, "_is_replica", False),  # DataParallel gathers the logits
        _hooks(head) or _hooks(model.lm_head),
        modules._global_forward_hooks or modules._global_forward_pre_hooks,
        modules._global_backward_hooks or modules._global_backward_pre_hooks,
    )
    return (
        torch.is_grad_enabled()
        and not any(special)
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and not torch._C._are_functorch_transforms_active()
        and kwargs.get("return_dict", model.config.return_dict) is not False
        and labels.numel() > 2 * rows_of(head.out_features, head.weight)
        and _is_known(model.loss_function, losses)
        and _is_known(loss_utils.fixed_cross_entropy, losses)
        and _is_known(torch.nn.functional.cross_entropy, "torch.nn.functional")
        and _is_known(torch.nn.Linear.forward, "torch.nn.modules.linear")
        and _is_known(torch.nn.Module.__call__, "torch.nn.modules.module")
        and torch.nn.functional.linear is torch._C._nn.linear
        and all(type(each).__module__ in _MODES for each in _get_current_function_mode_stack())
    )


def _is_known(function: Any, module: str) -> bool:
    """Whether a function is the library's own, and was neither replaced nor decorated."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == sys.modules[module].__file__
