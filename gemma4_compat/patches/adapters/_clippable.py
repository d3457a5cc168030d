"""Lets PEFT target the linear layers inside Gemma 4's clipped linear layers ("wrappers")."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from ...model.parts import is_clippable
from ...objects import shadowed

#: Name of a wrapper -> names of its own modules, parameters and buffers.
Wrappers = Mapping[str, frozenset[str]]

#: The wrappers of the model in which PEFT currently searches for targets.
searched: ContextVar[Wrappers] = ContextVar("searched", default=MappingProxyType({}))


@contextmanager
def resolving(model: Any, config: Any = None) -> Iterator[Wrappers]:
    """While PEFT searches ``model`` for targets, a wrapper's name selects the layer inside it.

    A wrapper for which the user has registered an adapter layer in the config stays the target.
    """
    own = tuple(getattr(config, "_custom_modules", None) or ())
    wrapped = wrappers(model, but=own)
    token = searched.set({})  # _inner_patterns needs upstream's own matches
    try:
        patterns = _inner_patterns(config, wrapped) if wrapped and config is not None else {}
        searched.set(wrapped)
        with shadowed(config, **patterns) if patterns else nullcontext():
            yield wrapped
    finally:
        searched.reset(token)


def matching_inner(original: Any, config: Any, key: str) -> Any:
    """Called instead of ``check_target_module_exists``."""
    wrapped = searched.get()
    # LN tuning multiplies the output of any module, so it targets the wrapper itself.
    if not wrapped or config.peft_type == "LN_TUNING":
        return original(config, key)
    if key in wrapped:
        return False
    match = original(config, key)
    outer = key.removesuffix(".linear")
    # For an excluded module the result is falsy, but neither False nor None.
    if match in (False, None) and outer != key and outer in wrapped:
        return original(config, outer)
    return match


def wrappers(model: Any, but: tuple[type, ...] = ()) -> Wrappers:
    """The clipped linear layers of ``model``, by name; without those of these classes."""
    return {
        name: frozenset((*module._modules, *module._parameters, *module._buffers))
        for name, module in model.named_modules()
        if is_clippable(module) and not isinstance(module, but)
    }


def _inner_patterns(config: Any, wrapped: Iterable[str]) -> dict[str, Any]:
    """``rank_pattern``, ``feedforward_modules`` and the like, with the names of the inner layers.

    A key changes only if the targets name the layer by its wrapper, and if no key matches the
    inner name.  Every other key stays as it is.
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
                # PEFT warns about keys that match no target.
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
