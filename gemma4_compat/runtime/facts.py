"""What the runtime does with a model, for users."""

from __future__ import annotations

from typing import Any

from ..model.parts import is_ours
from .capture.conditions import device_or_obstacle, modules_of_a_step
from .capture.decoding import seen_obstacle
from .host.hooked import at_work

__all__ = ["at_work", "how_it_decodes"]


def how_it_decodes(model: Any) -> str | None:
    """How ``generate`` calls the decode steps of a model, as text; ``None`` for other models.

    Args:
        model: a transformers model; its weights are neither moved nor loaded.
    """
    if not is_ours(model):
        return None
    if _is_compiled_upstream(model):
        return 'compiled by transformers with cache_implementation="static"'
    why = device_or_obstacle(model, modules_of_a_step(model))[1] or seen_obstacle(model)
    if why is None:
        return 'captured as CUDA graphs with cache_implementation="static"'
    return f"eager, because {why}"


def _is_compiled_upstream(model: Any) -> bool:
    """Whether a model meets the criteria of ``GenerationMixin._valid_auto_compile_criteria``."""
    quantizer = getattr(model, "hf_quantizer", None)
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    return (
        model.device.type == "cuda"
        and (quantizer is None or quantizer.is_compileable)
        and not places & {"cpu", "disk"}
    )
