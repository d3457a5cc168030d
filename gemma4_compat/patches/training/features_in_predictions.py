"""``Trainer`` takes the features of images and sound for predictions, beside the logits.

It leaves out what the config lists in ``keys_to_ignore_at_inference``.  Gemma 4 and 3n list no
features.  So ``compute_metrics`` gets a tuple, and the features of all rows are kept in memory.
The fix leaves them out, unless ``ignore_keys`` or a config of the user's has a list.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

from ...engine import Finding, Patch, drifted, fixed_if
from ...engine.probing import code_at, mentions
from ...model.parts import is_ours

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="features_in_predictions",
    symptom="compute_metrics with images or sound: 'tuple' object has no attribute 'argmax'",
    affects=("transformers",),
    changes="Trainer's predictions of Gemma 4 and 3n have no features, caches or shared keys.",
    unreported="No report about these models is known upstream.",
)
_LIST = "keys_to_ignore_at_inference"
_KINDS = ("image", "video", "audio")
_NAMES = [f"{kind}_{end}" for kind in _KINDS for end in ("outputs", "hidden_states")]
_NAMES += ["shared_kv_states", "cache", "past_key_values"]
_INPUTS = {"pixel_values", "pixel_values_videos", "input_features"}
_trainers: WeakSet[Any] = WeakSet()  # those that the message was written for


@PATCH.probe
def trainer_follows_the_config() -> Finding:
    code = code_at("transformers.trainer", "Trainer.prediction_step")
    if not mentions(code, _LIST):
        return drifted(f"Trainer.prediction_step does not read {_LIST}")
    return fixed_if(mentions(code, _NAMES[0]), "Trainer leaves out features")


@PATCH.around("transformers.trainer", "Trainer.prediction_step")
def prediction_step(
    original: Any,
    self: Any,
    model: Any,
    inputs: Any,
    prediction_loss_only: Any,
    ignore_keys: Any = None,
) -> Any:
    if ignore_keys is None and is_ours(self.model):
        config = self.model.config
        owner = next((cls for cls in type(config).__mro__ if _LIST in vars(cls)), object)
        is_upstreams = owner.__module__.startswith(("transformers.", "builtins"))
        if is_upstreams and _LIST not in vars(config):
            ignore_keys = [*getattr(config, _LIST, ()), *_NAMES]
            if self.compute_metrics and self not in _trainers and _INPUTS & {*inputs}:
                _trainers.add(self)
                logger.warning(
                    "compute_metrics and preprocess_logits_for_metrics get the logits as an array, "
                    "also for images and sound: [0] is the first row.  For a tuple with the "
                    "features, pass ignore_keys=[] to evaluate, ignore_keys_for_eval=[] to train."
                )
    return original(self, model, inputs, prediction_loss_only, ignore_keys)
