"""Converts names between Gemma 4's text model and its multimodal model.

Both have the same text modules: ``model.layers.0`` of ``Gemma4ForCausalLM`` is
``model.language_model.layers.0`` of ``Gemma4ForConditionalGeneration``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..errors import RefusedError

_TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
_MULTIMODAL = "model.language_model."
_TEXT = "model."
#: how names in the files of PEFT begin
PEFT = "base_model.model."


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


def renaming(model: Any) -> tuple[str, str]:
    """How names in the other of the two models begin, as a pattern, and how in ``model``."""
    if is_text_model(model):
        return r"^(?:model\.)?language_model\.", _TEXT if hasattr(model, "model") else ""
    inside = model.model.language_model
    parts = [name for name, _ in inside.named_children() if not hasattr(model.model, name)]
    return rf"^model\.(?=(?:{'|'.join(parts)})\.)", _MULTIMODAL


def other_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Tensor names of the other model -> names in ``model``, also those of a PEFT adapter.

    Raises:
        RefusedError: there is a tensor under both names.
    """
    pattern, beginning = renaming(model)
    names, found = set(names), {}
    for name in sorted(names):
        start = PEFT if name.startswith(PEFT) else ""
        here = start + re.sub(pattern, beginning, name.removeprefix(start))
        if here == name:
            continue
        if here in names:
            raise RefusedError(
                f"the file has tensors under two names, such as {name} and {here}: it is unclear "
                f"which to load.  Remove the tensors with one of the two names from the file"
            )
        found[name] = here
    return found


def name_there(model: Any, name: str) -> str:
    """Convert a name from ``model`` to the name in the other of the two models."""
    own, other = (_TEXT, _MULTIMODAL) if is_text_model(model) else (_MULTIMODAL, _TEXT)
    return f"{other}{name.removeprefix(own)}" if name.startswith(own) else name


def with_renaming(load_config: Any, *renamings: Any) -> Any:
    """A copy of transformers' ``LoadStateDictConfig`` with more renamings."""
    return replace(load_config, weight_mapping=[*(load_config.weight_mapping or ()), *renamings])


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
