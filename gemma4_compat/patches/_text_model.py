"""Converts names between Gemma 4's text model and its multimodal model.

Both have the same text modules: ``model.layers.0`` of ``Gemma4ForCausalLM`` is
``model.language_model.layers.0`` of ``Gemma4ForConditionalGeneration``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

_TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
_MULTIMODAL = "model.language_model."
_TEXT = "model."


def is_text_model(model: Any) -> bool:
    """Whether this is Gemma 4's text model, loaded without the multimodal model."""
    # A multimodal config that is read from a text model's file has the type of the file.
    is_text = getattr(model.config, "model_type", None) in _TEXT_TYPES
    return is_text and not hasattr(model.config, "text_config")


def is_gemma4(model: Any) -> bool:
    """Whether this is Gemma 4's text model or multimodal model, with its head."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    inner = getattr(model, "model", None)
    if model_type not in ("gemma4", "gemma4_unified", *_TEXT_TYPES):
        return False
    return inner is not None if is_text_model(model) else hasattr(inner, "language_model")


def name_here(model: Any, name: str) -> str:
    """Convert a name from the other of the two models to the name in ``model``.

    Returns ``name`` unchanged if it is already a name of ``model``, or if ``model`` has no such
    module.
    """
    inner = getattr(model, "model", None)
    text = inner if is_text_model(model) else getattr(inner, "language_model", None)
    if text is None:
        return name
    own, other = (_MULTIMODAL, _TEXT) if text is not inner else (_TEXT, _MULTIMODAL)
    rest = name.removeprefix(other)
    part = rest.partition(".")[0]
    if rest == name or not hasattr(text, part) or (text is not inner and hasattr(inner, part)):
        return name
    return f"{own}{rest}"


def name_there(model: Any, name: str) -> str:
    """Convert a name from ``model`` to the name in the other of the two models."""
    own, other = (_TEXT, _MULTIMODAL) if is_text_model(model) else (_MULTIMODAL, _TEXT)
    return f"{other}{name.removeprefix(own)}" if name.startswith(own) else name


def with_renaming(load_config: Any, *renamings: Any) -> Any:
    """A copy of transformers' ``LoadStateDictConfig`` with more renamings."""
    return replace(load_config, weight_mapping=[*(load_config.weight_mapping or ()), *renamings])


def multimodal_renaming(model: Any) -> Any:
    """transformers' renaming of the text model's names for the multimodal ``model``."""
    from transformers.core_model_loading import WeightRenaming

    parts = "|".join(map(re.escape, text_parts(model)))
    return WeightRenaming(rf"^model\.(?=(?:{parts})\.)", _MULTIMODAL)


def text_parts(model: Any) -> list[str]:
    """The names of the text model's modules that the multimodal ``model`` lacks beside it."""
    inside = model.model.language_model
    return [name for name, _ in inside.named_children() if not hasattr(model.model, name)]


def tensor_shapes(state_dict: Any, checkpoint_files: Any) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors to load; without those in pickles, which need a read."""
    if state_dict is not None:
        return {name: tuple(getattr(value, "shape", ())) for name, value in state_dict.items()}
    from safetensors import safe_open

    shapes = {}
    for file in checkpoint_files or ():
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes
