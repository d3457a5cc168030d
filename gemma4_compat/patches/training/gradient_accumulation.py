"""Gradient accumulation gives each micro batch the same weight, however many tokens it has.

A step over several micro batches equals a step over all of them as one batch only if each micro
batch counts by its number of tokens.  ``Trainer`` can count these tokens and pass the number to the
model as ``num_items_in_batch``; the models' loss divides by it.  But
``Gemma4ForConditionalGeneration``, ``Gemma4UnifiedForConditionalGeneration`` and
``Gemma3nForConditionalGeneration`` declare ``accepts_loss_kwargs = False``, a copy from PaliGemma,
which had another loss.  So ``Trainer`` averages the means of the micro batches: a token in a short
micro batch counts more than a token in a long one.  There is no error, but the gradients are wrong.

The fix multiplies the loss of each micro batch by its tokens, and divides it by their number in the
step.  ``Trainer`` and its subclasses see the same flags and numbers as without the fix, but
``Trainer.training_step`` returns the weighted loss.  The fix looks at the loss that
``compute_loss`` returns for each micro batch, and changes it only if it is the mean that
``Trainer.compute_loss`` or TRL's ``SFTTrainer.compute_loss`` computed.  After any other loss, such
as one that a ``compute_loss`` of the user computes, or one whose gradient a hook may change, the
fix stays away from this trainer, so that all micro batches count as without it.  If losses of the
same step were weighted before, the rest of this step is weighted, too.  The loss of a user's model
class is weighted if it is PyTorch's mean cross entropy of all labels.  Nothing changes for a
trainer that gets the result of ``torch.compile(model)``, and with context or sequence parallelism.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from ...engine import Finding, Patch, broken, drifted, fixed
from ...engine.probing import code_at
from ...objects import shadowed
from .._families import GEMMA3N, GEMMA4, UNIFIED

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="gradient_accumulation",
    symptom=(
        "with gradient_accumulation_steps, tokens in short micro batches count more than tokens in "
        "long ones, without an error"
    ),
    affects=("transformers",),
    unreported=(
        "No report about these models is known upstream; transformers #37766 is about others."
    ),
    differs="the loss weights micro batches by their tokens, and is another one",
)

_TRAINER = "transformers.trainer"
_MODELS = {
    f"{family.module}.{family.prefix}ForConditionalGeneration"
    for family in (GEMMA4, UNIFIED, GEMMA3N)
}
_FLAG = "accepts_loss_kwargs"
_NUMBER = "num_items_in_batch"
_IGNORED = -100  # the label of a token that is no target
_SPLIT = (
    "Trainer uses torch.nn.DataParallel: it divides each batch between %s GPUs and takes the mean "
    "of their losses, however many tokens each has.  It is the same without gemma4_compat.  For "
    "the loss of one GPU, start the program with accelerate launch, or with CUDA_VISIBLE_DEVICES=0."
)
_CHANGED = "the labels of a micro batch were changed after Trainer collected it"


@dataclass
class _Step:
    """One optimizer step.

    If one of its losses turns out to be the user's own after others were weighted, this one is
    weighted, too: else the weights of the step would not be 1 on average.
    """

    weight: Any  # of a token
    batches: list[tuple[Any, Any]]  # the labels of each micro batch, and their count of tokens
    has_begun: bool = False  # whether a loss of this step was weighted


_steps: WeakKeyDictionary[Any, _Step | None] = WeakKeyDictionary()  # the current one by trainer
#: trainers with a loss that is not weighted
_left_alone: WeakSet[Any] = WeakSet()
#: .losses: what Trainer.compute_loss returned for the current micro batch: the loss, what computed
#: it, and its count of tokens
_now = threading.local()


@PATCH.probe
def trainer_asks_the_model() -> Finding:
    """Check whether Trainer reads the model's flag; the model class may not be imported yet."""
    names = code_at("transformers.trainer", "Trainer.__init__").co_names
    if _FLAG not in (*names, *code_at("transformers.trainer", "Trainer.__init__").co_consts):
        return fixed("Trainer does not read accepts_loss_kwargs of models")
    if f"model_{_FLAG}" not in names:
        return drifted("Trainer does not store accepts_loss_kwargs as model_accepts_loss_kwargs")
    return broken()


@PATCH.around(_TRAINER, "Trainer.get_batch_samples")
def get_batch_samples(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    batches, number = original(self, *args, **kwargs)
    if self.args.n_gpu > 1 and self not in _left_alone and _is_known(self):
        _left_alone.add(self)
        logger.warning(_SPLIT, self.args.n_gpu)
    _steps[self] = None if self in _left_alone else _step_of(self, batches, number)
    return batches, number


@PATCH.around(_TRAINER, "Trainer.training_step")
def training_step(
    original: Any, self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    step = _steps.get(self)
    if step is None:
        return original(self, model, inputs, *args, **kwargs)
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    count = next((each for own, each in step.batches if own is labels), None)
    if count is None:
        _leave_alone(self, step, _CHANGED)
        count = sum(each for _, each in step.batches) / len(step.batches)
    if self in _left_alone and not step.has_begun:
        return original(self, model, inputs, *args, **kwargs)
    with shadowed(self, compute_loss=_weighting(self, count, step)):
        return original(self, model, inputs, *args, **kwargs)


def _weighting(trainer: Any, count: Any, step: _Step) -> Any:
    """The trainer's ``compute_loss``, weighted by the count if it returns a mean of tokens."""
    import torch

    compute_loss = trainer.compute_loss

    @wraps(compute_loss)
    def weighted(*args: Any, **kwargs: Any) -> Any:
        outer = getattr(_now, "losses", None)
        losses: list[tuple[Any, Any, Any]] = []
        # Inside another call, the loss is that of an evaluation.
        _now.losses = losses if outer is None else None
        try:
            result = compute_loss(*args, **kwargs)
        finally:
            _now.losses = outer
        if outer is not None:
            return result
        loss = result[0] if isinstance(result, tuple) else result
        kept = ((own, each) for own, made_by, each in losses if _made_by(own) is made_by)
        tokens = next((each for own, each in kept if own is loss), None)
        if getattr(loss, "_backward_hooks", None):  # they may change its gradient
            tokens = None
        has_number = trainer.model_accepts_loss_kwargs and kwargs.get(_NUMBER) is not None
        if not losses and not has_number and _is_from_trl(compute_loss):
            tokens = count
        if trainer not in _left_alone and (tokens is None or int(tokens) != int(count)):
            # With the number, it may have reached the loss, or the loss is the user's.
            why = None if has_number or not losses else _why(trainer, losses, tokens)
            _leave_alone(trainer, step, why)
        if trainer in _left_alone and not step.has_begun:
            return result
        step.has_begun = True
        weight = (count * step.weight.to(count.device)).to(loss.device)
        # 0, not NaN, if no token counts
        loss = torch.where(weight == 0, torch.zeros_like(loss), loss * weight)
        return (loss, *result[1:]) if isinstance(result, tuple) else loss

    return weighted


def _why(trainer: Any, losses: list[tuple[Any, Any, Any]], tokens: Any) -> str:
    """Why the loss of a micro batch is not weighted."""
    if tokens is not None:
        return _CHANGED
    if any(each is not None for *_, each in losses):
        name = type(trainer).__name__
        return f"{name}.compute_loss changes the loss that Trainer.compute_loss returns"
    return "the loss is not a mean cross entropy of PyTorch"


@PATCH.around(_TRAINER, "Trainer.compute_loss")
def compute_loss(
    original: Any, self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    from transformers.trainer_pt_utils import LabelSmoother

    losses = getattr(_now, "losses", None)
    if losses is None:
        return original(self, model, inputs, *args, **kwargs)
    labels = inputs.get("labels") if type(self.label_smoother) is LabelSmoother else None
    result = original(self, model, inputs, *args, **kwargs)
    loss = result[0] if isinstance(result, tuple) else result
    number = args[1] if len(args) > 1 else kwargs.get(_NUMBER)
    counted = self.model_accepts_loss_kwargs and number is not None
    if labels is None:
        # Trainer multiplies the loss of a model by the number of processes.
        tokens = _tokens(loss, counted and self.args.average_tokens_across_devices)
    else:  # LabelSmoother computes a mean, unless it gets the number
        tokens = None if counted else labels[..., 1:].ne(_IGNORED).sum()
    losses.append((loss, _made_by(loss), tokens))
    return result


# -- the weights -----------------------------------------------------------------------------------


def _step_of(trainer: Any, batches: list[Any], number: Any) -> _Step | None:
    """The step with these batches; ``None`` if there is nothing to weight.

    The weights of the micro batches are 1 on average.
    """
    if not _is_known(trainer) or _shards_sequences(trainer):
        return None
    if trainer.compute_loss_func is not None or getattr(trainer, "loss_is_scaled_for_ga", None):
        return None
    across = trainer.args.average_tokens_across_devices and trainer.args.world_size > 1
    if len(batches) == 1 and not across:
        return None
    counts = [_targets(batch) for batch in batches]
    if any(count is None for count in counts):
        counts = [0] * len(counts)
    total: Any = sum(counts)
    if across:  # all processes must take part, whatever their batches hold
        import torch

        total = torch.as_tensor(total, device=trainer.args.device)
        total = trainer.accelerator.gather(total).sum()
    if not any(hasattr(count, "ndim") for count in counts):
        return None
    factor = 1
    # Without the number, Trainer divides the loss by these; it is a mean over the processes, too.
    if number is None or not trainer.model_accepts_loss_kwargs:
        factor = len(batches) * (trainer.accelerator.num_processes if across else 1)
    labels = [batch["labels"] for batch in batches]
    return _Step(factor / total.clamp(min=1), list(zip(labels, counts, strict=True)))


def _is_known(trainer: Any) -> bool:
    """Whether a trainer's model inherits from a class in ``_MODELS``."""
    from transformers.trainer import unwrap_peft_model

    model = unwrap_peft_model(trainer.accelerator.unwrap_model(trainer.model))
    return any(f"{cls.__module__}.{cls.__qualname__}" in _MODELS for cls in type(model).__mro__)


def _shards_sequences(trainer: Any) -> bool:
    """Whether each process has a part of each row only."""
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    flags = ("cp_enabled", "sp_enabled")
    return parallel is not None and any(getattr(parallel, flag, False) for flag in flags)


def _targets(batch: Any) -> Any:
    """The number of labels that the loss of a model counts, as a tensor; ``None`` without labels.

    The first label of each row has no token before it that could predict it.
    """
    labels: Any = batch.get("labels") if isinstance(batch, Mapping) else None
    if not hasattr(labels, "ndim"):
        return None
    shifted = batch.get("shift_labels")
    return (labels[..., 1:] if shifted is None else shifted).ne(_IGNORED).sum()


# -- the loss --------------------------------------------------------------------------------------


def _made_by(loss: Any) -> Any:
    """What computed the loss; a change in place replaces it."""
    return getattr(loss, "grad_fn", None)


def _tokens(loss: Any, scaled: Any) -> Any:
    """The number of tokens in a mean cross entropy of PyTorch; ``None`` for any other loss.

    ``scaled``: the mean was multiplied once.
    """
    computed = _made_by(loss)
    if scaled and type(computed).__name__ == "MulBackward0":
        computed = computed.next_functions[0][0]
    while type(computed).__name__ == "_DDPSinkBackward":  # DDP hands outputs through
        computed = computed.next_functions[loss.output_nr][0]
    if (
        type(computed).__name__ == "NllLossBackward0"
        and getattr(computed, "_saved_reduction", None) == 1  # at::Reduction::Mean
        and getattr(computed, "_saved_weight", computed) is None
    ):
        return getattr(computed, "_saved_total_weight", None)
    return None


def _is_from_trl(compute_loss: Any) -> bool:
    """Whether this is ``SFTTrainer.compute_loss`` of TRL; it is a mean if no number is passed."""
    code = getattr(getattr(compute_loss, "__func__", None), "__code__", None)
    path = getattr(code, "co_filename", "").replace("\\", "/")
    return path.endswith("/trl/trainer/sft_trainer.py")


def _leave_alone(trainer: Any, step: _Step, why: str | None) -> None:
    if trainer in _left_alone:
        return
    _left_alone.add(trainer)
    if why is not None:
        logger.warning(
            "from %s on each micro batch has the same weight in the gradient, however many tokens "
            "it has, because %s.  It is the same without gemma4_compat.",
            "the next step" if step.has_begun else "now",
            why,
        )
