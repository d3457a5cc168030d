"""Inspect a loaded model: the placement of its parts, and what is damaged."""

from __future__ import annotations

from typing import Any

from ..model.hooks import input_device
from ..patches.generation.captured_decoding import how_it_decodes
from ..patches.offloading import host_embedding, offload_streaming
from .loaded import Loaded, device_text, mapped_model
from .placement import ModelInspection


def inspect_model(model: Any) -> ModelInspection:
    """Inspect the placement of a loaded model; nothing is moved, loaded or changed.

    Works for plain models and ``PeftModel``, on one device or several, quantised or not.  Tensors
    without values are damaged: 4-bit layers whose quant state is on meta, and tensors of the model
    or of an adapter that are on meta without a hook that onloads them.  It is also a problem if 4
    or 8 bit were requested and no linear layer is quantised.

    The base model's ``from_pretrained`` decides the placement.  A ``device_map`` given to
    ``PeftModel.from_pretrained`` has no effect: an adapter has no placement of its own, and its
    tensors go to the devices that the adapted layers compute on.

    Args:
        model: a ``torch.nn.Module``, also inside ``torch.compile`` or ``DataParallel``.  Input
            device, device map and adapters are reported for a transformers or PEFT model only.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``.

    Example:
        >>> inspection = inspect_model(model)
        >>> inspection.ok
        True
        >>> inspection.problems
        ()
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"inspect_model needs a torch.nn.Module, not {type(model).__name__}")
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
    """The model inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``."""
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
    options = config if isinstance(config, dict) else config.to_dict()
    if options.get("load_in_4bit") or options.get("_load_in_4bit"):
        nested = ", double quantisation" if options.get("bnb_4bit_use_double_quant") else ""
        return f"4-bit ({options.get('bnb_4bit_quant_type')}{nested})"
    if options.get("load_in_8bit") or options.get("_load_in_8bit"):
        return "8-bit"
    method = options.get("quant_method")
    return str(getattr(method, "value", method))


def _device_map(model: Any) -> dict[str, str] | None:
    base = mapped_model(model)
    return None if base is None else {name: str(d) for name, d in base.hf_device_map.items()}


def _input_device(model: Any) -> str | None:
    try:
        return device_text(input_device(model))
    except (TypeError, ValueError, AttributeError):
        return None
