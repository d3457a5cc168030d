"""The text model alone, and inside of the multimodal one: the same parts, under other names.

``model.layers.0`` of ``Gemma4ForCausalLM`` is ``model.language_model.layers.0`` of
``Gemma4ForConditionalGeneration``.
"""

from __future__ import annotations

from typing import Any

_INSIDE = "model.language_model."
_ALONE = "model."


def is_text_model(model: Any) -> bool:
    """Whether this is the text model of Gemma 4, without the multimodal model around it."""
    return getattr(model.config, "model_type", None) in ("gemma4_text", "gemma4_unified_text")


def renamed(model: Any, name: str) -> str:
    """The name that a tensor or module of the other one of the two models has in this one.

    ``name`` itself, where it is a name of this model already, or of neither.
    """
    inner = getattr(model, "model", None)
    if inner is None or not name.startswith(_ALONE):
        return name
    alone = is_text_model(model)
    prefix, other = (_ALONE, _INSIDE) if alone else (_INSIDE, _ALONE)
    text = inner if alone else getattr(inner, "language_model", None)
    rest = name.removeprefix(other)
    if rest == name or text is None:
        return name
    part = rest.partition(".")[0]
    has = (hasattr(text, part), hasattr(inner, part) and not alone)
    return f"{prefix}{rest}" if has == (True, False) else name
