"""PEFT does not know Gemma 4's clipped linear layers.

The vision and audio towers wrap their projections in ``Gemma4ClippableLinear``: a module that
clamps, calls the ``nn.Linear`` it holds as ``.linear``, and clamps again.  Target patterns such as
``q_proj`` match the wrapper, which is no ``nn.Linear``, and every PEFT method refuses it.

The fix resolves targets the way the maintainers advise to write them: a pattern that matches the
wrapper counts for the linear layer inside, so the adapter goes around the inner layer and the
clipping stays around both.  Patterns that name ``.linear`` themselves, or match both, behave as
before and yield one adapter.  Adapters are saved with ``...q_proj.linear.lora_A...`` keys, as
those in the wild are; the minority saved as ``...q_proj.lora_A...`` is renamed on load.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from ..engine import Finding, Patch, broken, fixed
from ._shadow import shadowed

PATCH = Patch(
    name="clippable_linear",
    symptom="Target module Gemma4ClippableLinear(...) is not supported",
    affects=(("transformers>=5.5", "peft>=0.18"),),
    changes=(
        "PEFT's tuners match the linear layer inside a ...ClippableLinear wherever a target, "
        "rank or alpha pattern matches the wrapper.  Adapter files whose keys lack '.linear' "
        "load through PEFT and through transformers' own load_adapter."
    ),
    ends="not fixed upstream as of peft 0.21.2; the maintainers advise to target the inner module",
    links=("https://github.com/huggingface/peft/issues/3129",),
)

Check = Callable[[Any, str], Any]


@PATCH.probe
def wrapper_is_unknown() -> Finding:
    """PEFT has no plugin for this: support would have to name the class in its own source."""
    import inspect

    from peft.tuners import tuners_utils
    from peft.tuners.lora import model as lora_model

    for module in (tuners_utils, lora_model):
        if "ClippableLinear" in inspect.getsource(module):
            return fixed(f"{module.__name__} handles ...ClippableLinear itself")
    return broken()


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.__init__")
def tuner_init(original: Any) -> Any:
    @wraps(original)
    def __init__(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        # Some tuners (VeRA, RandLora, ...) size shared tensors by their targets before injection.
        with shadowed(self, **_resolving(self, model)):
            original(self, model, *args, **kwargs)

    return __init__


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.inject_adapter")
def inject_adapter(original: Any) -> Any:
    @wraps(original)
    def inject_adapter(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._check_target_module_exists, _InnerCheck):  # called by __init__
            return original(self, model, *args, **kwargs)
        with shadowed(self, **_resolving(self, model)):
            return original(self, model, *args, **kwargs)

    return inject_adapter


@PATCH.replaces("peft.utils.save_and_load", "set_peft_model_state_dict")
def set_peft_model_state_dict(original: Any) -> Any:
    @wraps(original)
    def set_peft_model_state_dict(
        model: Any, peft_model_state_dict: Any, *args: Any, **kwargs: Any
    ) -> Any:
        names = _wrappers(model)
        if names:
            peft_model_state_dict = {
                _inner_key(key, names): value for key, value in peft_model_state_dict.items()
            }
        return original(model, peft_model_state_dict, *args, **kwargs)

    return set_peft_model_state_dict


@PATCH.replaces("transformers.integrations.peft", "PeftAdapterMixin.load_adapter")
def load_adapter(original: Any) -> Any:
    @wraps(original)
    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = _wrappers(self)
        if not names:
            return original(self, *args, **kwargs)
        load = self._load_pretrained_model

        @wraps(load)
        def load_pretrained_model(*args: Any, load_config: Any, **kwargs: Any) -> Any:
            from transformers.core_model_loading import WeightRenaming

            either = "|".join(re.escape(name) for name in sorted(names))
            inner = WeightRenaming(rf"((?:{either})\.)(?!linear\.)", r"\1linear.")
            mapping = [*(load_config.weight_mapping or ()), inner]
            load_config = dataclasses.replace(load_config, weight_mapping=mapping)
            return load(*args, load_config=load_config, **kwargs)

        with shadowed(self, _load_pretrained_model=load_pretrained_model):
            return original(self, *args, **kwargs)

    return load_adapter


class _InnerCheck:
    """A tuner's target check that never answers for a wrapper, but for the layer inside it."""

    def __init__(self, check: Check, wrappers: set[str]) -> None:
        self.check = check
        self.wrappers = wrappers

    def __call__(self, config: Any, key: str) -> Any:
        if key in self.wrappers:
            return False
        found = self.check(config, key)
        # "Excluded" is falsy, but neither False nor None.
        if found or found not in (False, None) or not self.is_inner(key):
            return found
        return self.check(config, key.removesuffix(".linear"))

    def is_inner(self, key: str) -> bool:
        return key.endswith(".linear") and key.removesuffix(".linear") in self.wrappers

    def pattern_key(self, config: Any, key: str) -> str:
        """The name that rank, alpha and feedforward patterns are to be compared with.

        The wrapper's only where its name was the match: else all is as without this patch.
        """
        patterns = any(
            value and (name.endswith("_pattern") or name == "feedforward_modules")
            for name, value in vars(config).items()
        )
        if patterns and self.is_inner(key) and not self.check(config, key):
            return key.removesuffix(".linear")
        return key


def _resolving(tuner: Any, model: Any) -> dict[str, Any]:
    """What to shadow on a tuner while it looks for its targets in ``model``."""
    wrappers = _wrappers(model)
    if not wrappers:
        return {}
    check = _InnerCheck(tuner._check_target_module_exists, wrappers)
    create = tuner._create_and_replace

    @wraps(create)
    def create_and_replace(
        config: Any, adapter_name: str, target: Any, target_name: str, parent: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if _is_wrapper(target):  # a state dict, not a pattern, named the wrapper
            parent, target, target_name = target, target.linear, "linear"
        elif "current_key" in kwargs:
            kwargs["current_key"] = check.pattern_key(config, kwargs["current_key"])
        return create(config, adapter_name, target, target_name, parent, *args, **kwargs)

    return {"_check_target_module_exists": check, "_create_and_replace": create_and_replace}


def _is_wrapper(module: Any) -> bool:
    """Gemma4ClippableLinear, its copies in sibling models, and subclasses of either."""
    named = any(cls.__name__.endswith("ClippableLinear") for cls in type(module).__mro__)
    return named and "linear" in module._modules


def _wrappers(model: Any) -> set[str]:
    return {name for name, module in model.named_modules() if _is_wrapper(module)}


def _inner_key(key: str, wrappers: set[str]) -> str:
    """``...q_proj.lora_A.weight`` -> ``...q_proj.linear.lora_A.weight`` for wrapped layers."""
    parts = key.split(".")
    for end in range(1, len(parts)):
        if ".".join(parts[:end]) in wrappers and parts[end] != "linear":
            return ".".join([*parts[:end], "linear", *parts[end:]])
    return key
