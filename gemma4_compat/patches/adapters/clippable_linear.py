"""PEFT does not support Gemma 4's clipped linear layers.

The vision and audio towers wrap their projections in ``Gemma4ClippableLinear``: a module that
clamps, calls its inner ``nn.Linear``, named ``.linear``, and clamps again.  Target patterns such as
``q_proj`` match the wrapper.  It is not an ``nn.Linear``, so every PEFT method refuses it.

The fix resolves targets as PEFT's maintainers advise users to write them: a pattern that matches
the wrapper selects the linear layer inside, so the adapter wraps the inner layer and the clipping
stays around both.  Patterns that name ``.linear``, or match both, behave as before and give one
adapter.  Adapters are saved with ``...q_proj.linear.lora_A...`` keys, as most published adapters
are; files with ``...q_proj.lora_A...`` keys are renamed on load.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...engine.probing import mentions
from ._clippable import inner_keys, matching_inner, resolving, wrappers
from ._native_names import LOAD_ADAPTER, loading_in, loading_with

PATCH = Patch(
    name="clippable_linear",
    symptom="Target module Gemma4ClippableLinear(...) is not supported",
    affects=("transformers", "peft"),
    note="PEFT's maintainers advise to target the inner module.",
    links=(
        "https://github.com/huggingface/peft/issues/3129",
        "https://github.com/huggingface/transformers/pull/45388",
        "https://github.com/unslothai/unsloth/pull/4807",
        "https://github.com/p-e-w/heretic/issues/278",
        "https://github.com/Roblox/FAI-RL/pull/104",
    ),
)


@PATCH.probe
def wrapper_is_unknown() -> Finding:
    """Search PEFT's code for the class name, because PEFT has no plugins for layer types."""
    from peft.tuners import tuners_utils
    from peft.tuners.lora import model as lora_model

    for module in (tuners_utils, lora_model):
        if mentions(module.__spec__.loader.get_code(module.__name__), "ClippableLinear"):
            return fixed(f"{module.__name__} handles ...ClippableLinear itself")
    return broken()


PATCH.around("peft.tuners.tuners_utils", "check_target_module_exists")(matching_inner)


@PATCH.around("peft.tuners.tuners_utils", "BaseTuner.__init__")
def tuner_init(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    # Some tuners (VeRA, RandLora, ...) search their targets before injection, to size tensors.
    with resolving(model):
        original(self, model, *args, **kwargs)


@PATCH.around("peft.tuners.tuners_utils", "BaseTuner.inject_adapter")
def inject_adapter(
    original: Any, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    with resolving(model, self.peft_config[adapter_name]) as wrapped:
        if wrapped and kwargs.get("state_dict"):  # defines the targets instead of the config
            kwargs["state_dict"] = inner_keys(kwargs["state_dict"], wrapped)
        return original(self, model, adapter_name, *args, **kwargs)


@PATCH.around("peft.tuners.tuners_utils", "inspect_matched_modules")
def inspect_matched_modules(original: Any, tuner: Any, adapter_name: str = "default") -> Any:
    with resolving(tuner.model, tuner.peft_config[adapter_name]):
        return original(tuner, adapter_name)


@PATCH.around("peft.utils.save_and_load", "set_peft_model_state_dict")
def set_peft_model_state_dict(
    original: Any, model: Any, peft_model_state_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    wrapped = wrappers(model)
    if wrapped:
        peft_model_state_dict = inner_keys(peft_model_state_dict, wrapped)
    return original(model, peft_model_state_dict, *args, **kwargs)


@PATCH.around(*LOAD_ADAPTER)
@loading_in
def load_adapter(model: Any, adapter_name: str) -> Any:
    wrapped = wrappers(model)
    return loading_with(model, lambda: [_inner_names(wrapped)]) if wrapped else nullcontext()


def _inner_names(wrapped: Any) -> Any:
    from transformers.core_model_loading import WeightRenaming

    either = "|".join(map(re.escape, wrapped))
    # A copy in modules_to_save has the same parts as its original.
    own = {"modules_to_save"}.union(*wrapped.values())
    parts = "|".join(sorted(own))
    return WeightRenaming(rf"((?:{either})\.)(?!(?:{parts})(?:\.|$))", r"\1linear.")
