"""The text model alone, and inside of the multimodal one: the same parts, under other names.

``model.layers.0`` of ``Gemma4ForCausalLM`` is ``model.language_model.layers.0`` of
``Gemma4ForConditionalGeneration``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

_INSIDE = "model.language_model."
_ALONE = "model."


def is_text_model(model: Any) -> bool:
    """Whether this is the text model of Gemma 4, without the multimodal model around it."""
    return getattr(model.config, "model_type", None) in ("gemma4_text", "gemma4_unified_text")


def is_gemma4(model: Any) -> bool:
    """Whether this is the text model or the multimodal one, with its head."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type in ("gemma4", "gemma4_unified") or (
        model_type is not None and hasattr(model, "model") and is_text_model(model)
    )


def name_here(model: Any, name: str) -> str:
    """The name in this one of the two models of what has this name in the other one.

    ``name`` itself, if it is a name of this model already, or if this model has no such part.
    """
    inner = getattr(model, "model", None)
    text = inner if is_text_model(model) else getattr(inner, "language_model", None)
    if text is None:
        return name
    here, other = (_INSIDE, _ALONE) if text is not inner else (_ALONE, _INSIDE)
    rest = name.removeprefix(other)
    part = rest.partition(".")[0]
    if rest == name or not hasattr(text, part) or (text is not inner and hasattr(inner, part)):
        return name
    return f"{here}{rest}"


def name_there(model: Any, name: str) -> str:
    """The name that a part of this one of the two models has in the other one."""
    here, other = (_ALONE, _INSIDE) if is_text_model(model) else (_INSIDE, _ALONE)
    return f"{other}{name.removeprefix(here)}" if name.startswith(here) else name


def with_renaming(load_config: Any, renaming: Any) -> Any:
    """transformers' ``LoadStateDictConfig`` with one renaming more."""
    return replace(load_config, weight_mapping=[*(load_config.weight_mapping or ()), renaming])


def tensor_names(state_dict: Any, checkpoint_files: Any) -> Iterator[str]:
    """The names of tensors to load; those in a pickle are not known before all of it is read."""
    if state_dict is not None:
        yield from state_dict
        return
    from safetensors import safe_open

    for file in checkpoint_files or ():
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                yield from opened.keys()
