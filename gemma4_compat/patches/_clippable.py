"""Finding adapter targets through Gemma 4's clipped linear layers; shared by two patches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType
from typing import Any

from ..model.parts import is_clippable
from ._shadow import shadowed

Wrappers = Mapping[str, frozenset[str]]  # by name, each with the names of its own parts

#: the wrappers of the model that PEFT is looking for targets in
searched: ContextVar[Wrappers] = ContextVar("searched", default=MappingProxyType({}))


@contextmanager
def resolving(model: Any, config: Any = None) -> Iterator[Wrappers]:
    """While PEFT looks for targets in ``model``, names of wrappers stand for the layers inside."""
    wrapped = wrappers(model)
    token = searched.set({})  # what the patterns match by themselves
    try:
        patterns = _inner_patterns(config, wrapped) if wrapped and config is not None else {}
        searched.set(wrapped)
        with shadowed(config, **patterns) if patterns else nullcontext():
            yield wrapped
    finally:
        searched.reset(token)


def matching_inner(original: Any) -> Any:
    """What replaces check_target_module_exists in each patch that resolves targets.

    Around itself it changes nothing.
    """

    @wraps(original)
    def check_target_module_exists(config: Any, key: str) -> Any:
        wrapped = searched.get()
        # LN tuning multiplies the output of modules of any kind: it takes the wrapper as it is.
        if not wrapped or config.peft_type == "LN_TUNING":
            return original(config, key)
        if key in wrapped:
            return False
        found = original(config, key)
        outer = key.removesuffix(".linear")
        # "Excluded" is falsy, but neither False nor None.
        if found in (False, None) and outer != key and outer in wrapped:
            return original(config, outer)
        return found

    return check_target_module_exists


def wrappers(model: Any) -> Wrappers:
    """The modules in ``model`` that hold the layer to adapt, by name."""
    return {
        name: frozenset((*module._modules, *module._parameters, *module._buffers))
        for name, module in model.named_modules()
        if is_clippable(module)
    }


def _inner_patterns(config: Any, wrapped: Iterable[str]) -> dict[str, Any]:
    """``rank_pattern``, ``feedforward_modules`` and the like, in terms of the layers inside.

    Only for layers that the targets name by the wrapper, and only where no key matches the inner
    name: all else is as without this patch.
    """
    from peft.tuners.ia3 import IA3Model
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    dicts = {
        name: value
        for name, value in vars(config).items()
        if value and isinstance(value, dict) and name.endswith("_pattern")
    }
    feedforward = getattr(config, "feedforward_modules", None)
    if getattr(config, "target_modules", None) is None or not (dicts or feedforward):
        return {}
    outer = [
        name
        for name in wrapped
        if check_target_module_exists(config, name)
        and check_target_module_exists(config, f"{name}.linear") in (False, None)
    ]
    patterns: dict[str, Any] = {}
    for attribute, values in dicts.items():
        inner, renamed = {}, {}
        for name in outer:
            layer, key = f"{name}.linear", get_pattern_key(values, name)
            if key in values and get_pattern_key(values, layer) == layer:
                inner[layer] = values[key]
                # PEFT warns of keys that match no target.
                renamed[key] = f"(?:{key}|{re.escape(layer)})"
        patterns[attribute] = {renamed.get(key, key): values[key] for key in values} | inner
    if feedforward:
        is_feedforward = IA3Model._check_target_module_feedforward
        layers = [f"{name}.linear" for name in outer if is_feedforward(config, name)]
        if isinstance(feedforward, str):
            patterns["feedforward_modules"] = "|".join([feedforward, *map(re.escape, layers)])
        else:
            patterns["feedforward_modules"] = {*feedforward, *layers}
    return patterns


def inner_keys(state: Mapping[str, Any], wrapped: Wrappers) -> dict[str, Any]:
    """``...q_proj.lora_A.weight`` -> ``...q_proj.linear.lora_A.weight`` for wrapped layers."""

    def inner(key: str) -> str:
        parts = key.split(".")
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            if name in wrapped and parts[end] not in wrapped[name]:
                return ".".join([name, "linear", *parts[end:]])
        return key

    return {inner(key): value for key, value in state.items()}
