"""Passes ``num_items_in_batch`` from Trainer to the loss of a model.

It is the number of tokens in a whole optimizer step, over all micro batches.
"""

from __future__ import annotations

import logging
from functools import wraps
from inspect import signature, unwrap
from typing import Any

from ..engine import Finding, broken, drifted, fixed
from ._code import loads

logger = logging.getLogger(__name__)

#: Their loss is a mean by default, and a sum divided by ``num_items_in_batch`` if that is given.
_MODELS = {
    f"transformers.models.{package}.modeling_{package}.{name}ForConditionalGeneration"
    for package, name in (
        ("gemma4", "Gemma4"),
        ("gemma4_unified", "Gemma4Unified"),
        ("gemma3n", "Gemma3n"),
    )
}
_FLAG = "accepts_loss_kwargs"
_NUMBER = "num_items_in_batch"


# -- Trainer ---------------------------------------------------------------------------------------


def known_class(trainer: Any) -> Any:
    """The class in ``_MODELS`` of a trainer's model.

    ``None`` if there is none, or if the model has its own forward, which drops the number.
    """
    model = _model(trainer)
    for cls in type(model).__mro__:
        if f"{cls.__module__}.{cls.__qualname__}" in _MODELS:
            forward = _function(model.forward)
            is_upstreams = getattr(forward, "__module__", None) == cls.__module__
            return cls if is_upstreams or _uses_number(forward) else None
    return None


def is_declared_by(trainer: Any, known: type) -> bool:
    """Whether ``accepts_loss_kwargs`` is set by this class, not by a subclass or the instance."""
    model = _model(trainer)
    if _FLAG in vars(model):
        return False
    return next((cls for cls in type(model).__mro__ if _FLAG in vars(cls)), None) is known


def arrives(trainer: Any) -> bool:
    """Whether the number that Trainer counts reaches the loss.

    Warns if a ``compute_loss`` drops it while gradients are accumulated.
    """
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and parallel.sp_backend == "deepspeed" and parallel.sp_enabled:
        return False  # DeepSpeed's sequence parallelism counts tokens itself
    smoother = trainer.label_smoother
    if smoother is not None and _NUMBER not in signature(smoother.__call__).parameters:
        return False
    owners = _losses_without_the_number(trainer)
    if owners and trainer.args.gradient_accumulation_steps > 1:
        logger.warning(
            "%s.compute_loss does not use num_items_in_batch, so each micro batch has the same "
            "weight, however many tokens it has.  To give each token the same weight, pass "
            "num_items_in_batch on to super().compute_loss, or divide the summed loss by it.",
            owners[0],
        )
    return not owners


def with_predicted_labels(batch: Any, known: type) -> Any:
    """The batch with only the labels that the loss counts, for Trainer to count them.

    The first label of each row has no token before it that could predict it.
    """
    labels, shifted = batch["labels"], batch.get("shift_labels")
    if _leaves_out_padding(known):
        labels = _without_padding(labels, batch.get("attention_mask"))
    elif shifted is not None:
        return {**batch, "labels": shifted}
    return {**batch, "labels": labels[..., 1:]}


def _model(trainer: Any) -> Any:
    from transformers.trainer import unwrap_peft_model

    return unwrap_peft_model(trainer.accelerator.unwrap_model(trainer.model))


def _losses_without_the_number(trainer: Any) -> list[str]:
    """The classes whose own ``compute_loss`` does not use the number."""
    from transformers.trainer import Trainer

    mro = type(trainer).__mro__
    classes = mro[: mro.index(Trainer)]
    own = [(cls.__qualname__, vars(cls).get("compute_loss")) for cls in classes]
    own.append((type(trainer).__qualname__, vars(trainer).get("compute_loss")))
    return [name for name, function in own if function is not None and not _uses_number(function)]


def _function(callable_: Any) -> Any:
    """The plain function behind decorators, hooks and a bound method."""
    callable_ = unwrap(callable_)
    return getattr(callable_, "__func__", callable_)


def _uses_number(function: Any) -> bool:
    code = getattr(_function(function), "__code__", None)
    return code is not None and loads(code, _NUMBER)


# -- the forward of transformers 5.5, which always computes a mean ---------------------------------


def probe(model: Any) -> Finding:
    """Check whether the forward of this class always computes a mean."""
    if _leaves_out_padding(model):
        return broken()
    if "loss_function" in unwrap(model.forward).__code__.co_names:
        return fixed("the forward uses loss_function, which takes num_items_in_batch")
    return drifted(f"{model.__name__}.forward computes its loss in another way")


def with_number(original: Any) -> Any:
    """A forward whose loss is a sum divided by ``num_items_in_batch``, if that is given."""

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels, number = kwargs.get("labels"), kwargs.get(_NUMBER)
        if labels is None or number is None:
            return original(self, *args, **kwargs)
        output = original(self, *args, **{**kwargs, "labels": None, "return_dict": True})
        logits = output.logits.float()  # as upstream's forward does with labels
        loss = self.loss_function(
            logits,
            _without_padding(labels, kwargs.get("attention_mask")),
            self.config.get_text_config().vocab_size,
            num_items_in_batch=number,
        )
        output = type(output)(**{**output, "logits": logits, "loss": loss})
        given = kwargs.get("return_dict")
        wants_dict = self.config.return_dict if given is None else given
        return output if wants_dict else output.to_tuple()

    return forward


def without_second_division(name: str) -> Any:
    """``Trainer.__init__`` that stops accelerate from dividing the loss of models of this class.

    Until transformers 5.5.3, accelerate and Trainer both divide by the number of micro batches.
    """

    def factory(original: Any) -> Any:
        @wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            known = known_class(self)
            own_loss = self.compute_loss_func is not None
            if known is not None and known.__name__ == name and not own_loss:
                if self.model_accepts_loss_kwargs and arrives(self):
                    self.accelerator.gradient_accumulation_steps = 1

        return __init__

    return factory


def _leaves_out_padding(model: Any) -> bool:
    """Whether the loss ignores the positions that the attention mask excludes."""
    return "CrossEntropyLoss" in unwrap(model.forward).__code__.co_names


def _without_padding(labels: Any, mask: Any) -> Any:
    """The labels [batch, length] with -100 at padding."""
    if getattr(mask, "ndim", 0) != 2 or mask.shape[1] < labels.shape[1]:
        return labels
    # Prefix tuning puts virtual tokens in front of the mask.
    mask = mask[:, mask.shape[1] - labels.shape[1] :]
    return labels.masked_fill(mask.to(labels.device) == 0, -100)
