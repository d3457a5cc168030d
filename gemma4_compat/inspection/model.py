"""Where the parts of a loaded model are, and what of it is damaged."""

from __future__ import annotations

from typing import Any

from ..model.hooks import input_device
from ..patches.generation.captured_decoding import how_it_decodes
from ..patches.offloading import host_embedding, offload_streaming
from .loaded import Loaded, device_text, mapped_model
from .placement import ModelInspection


def inspect_model(model: Any) -> ModelInspection:
    """Say where the parts of a loaded model are; nothing is moved, loaded or changed.

    Works for plain models and ``PeftModel``, whole or split over devices, quantised or not.
    Damaged is what has lost its values: 4-bit layers whose quant state is on meta, and tensors of
    the model or of an adapter that are on meta with nothing to bring them in.  A problem is also a
    model for which 4 or 8 bit were asked, and of which no linear layer is quantised.

    The placement is that of the base model's ``from_pretrained``.  A ``device_map`` given to
    ``PeftModel.from_pretrained`` is ignored, as an adapter has no placement of its own: its tensors
    go where the layers that they adapt compute.

    Args:
        model: a ``torch.nn.Module``, also inside of ``torch.compile`` or ``DataParallel``; one
            made by transformers where input device, device map and adapters are to be known.

    Raises:
        TypeError: ``model`` is none.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"inspect_model wants a model, not {type(model).__name__}")
    model = _unwrapped(model)
    loaded = Loaded(model)
    base = loaded.base
    adapters = tuple(loaded.adapters())
    quantisation = _quantisation(base)
    return ModelInspection(
        model=type(model).__name__,
        base=type(base).__name__,
        quantisation=quantisation,
        device_map=_device_map(model),
        input_device=_input_device(model),
        decoding=how_it_decodes(base),
        page_locked=host_embedding.page_locked(base) + offload_streaming.page_locked(base),
        parts=tuple(loaded.parts()),
        offloaded=tuple(loaded.offloaded()),
        adapters=adapters,
        problems=(*loaded.problems(adapters), *loaded.not_quantised(quantisation)),
        notes=tuple(loaded.notes()),
    )


def _unwrapped(model: Any) -> Any:
    """The model inside of ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``."""
    inside = {
        "OptimizedModule": "_orig_mod",
        "DataParallel": "module",
        "DistributedDataParallel": "module",
    }
    while type(model).__name__ in inside:
        model = getattr(model, inside[type(model).__name__])
    return model


def _quantisation(base: Any) -> str | None:
    config = getattr(getattr(base, "config", None), "quantization_config", None)
    if config is None:
        return None
    told = config if isinstance(config, dict) else config.to_dict()
    if told.get("load_in_4bit") or told.get("_load_in_4bit"):
        nested = ", double quantisation" if told.get("bnb_4bit_use_double_quant") else ""
        return f"4-bit ({told.get('bnb_4bit_quant_type')}{nested})"
    if told.get("load_in_8bit") or told.get("_load_in_8bit"):
        return "8-bit"
    method = told.get("quant_method")
    return str(getattr(method, "value", method))


def _device_map(model: Any) -> dict[str, str] | None:
    base = mapped_model(model)
    return None if base is None else {name: str(d) for name, d in base.hf_device_map.items()}


def _input_device(model: Any) -> str | None:
    try:
        return device_text(input_device(model))
    except (TypeError, ValueError, AttributeError):
        return None
