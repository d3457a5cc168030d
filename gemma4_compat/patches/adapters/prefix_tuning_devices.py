"""Prefix tuning fails on every split Gemma 4, and on models without a GPU in their device map.

PEFT moves the prefix, a cache of keys and values, to the devices of the decoder layers.  It reads
these devices from ``hf_device_map``, and makes three mistakes.  It uses the first device that is
neither "cpu" nor "disk" for offloaded layers, but a map may have none (``StopIteration``).  It
reads ``config.num_hidden_layers``, which the config of a multimodal model does not have.  It treats
every name in the map that contains a number as a decoder layer, also a layer of a vision tower.

The fix uses the execution devices of the decoder layers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from ...model.hooks import hooks_of, input_device

PATCH = Patch(
    name="prefix_tuning_devices",
    symptom=(
        "StopIteration, or AttributeError: 'Gemma4Config' object has no attribute "
        "'num_hidden_layers', in a forward with prefix tuning or CARTRIDGE on a split model"
    ),
    affects=("transformers", "accelerate", "peft"),
    links=(
        "https://github.com/huggingface/peft/issues/3619",
        "https://github.com/huggingface/peft/pull/3621",
    ),
)


PATCH.copies(
    "peft.utils.integrations", "map_cache_to_layer_device_map", "b41d805e7338 c3510c0bf04e"
)


@PATCH.probe
def no_device_but_cpu_and_disk() -> Finding:
    """Get the layer devices of a multimodal model that is wholly offloaded."""
    from peft.utils.integrations import get_layer_device_map

    text = SimpleNamespace(num_hidden_layers=1)
    config = SimpleNamespace(get_text_config=lambda *args, **kwargs: text)
    model = SimpleNamespace(hf_device_map={"": "cpu"}, config=config)
    try:
        devices = get_layer_device_map(model)
    except (StopIteration, IndexError, AttributeError):
        return broken()
    if devices == {0: "cpu"}:
        return fixed("PEFT gets the devices of decoder layers right")
    return drifted(f"the devices of a model on the CPU are {devices}")


@PATCH.around("peft.peft_model", "map_cache_to_layer_device_map")
def map_cache_to_layer_device_map(original: Any, model: Any, cache: Any) -> None:
    layers = _decoder_layers(model)
    if layers is None or not hasattr(cache, "layers"):
        original(model, cache)
        return
    # KV-sharing layers come last, and have no entry in the cache.
    for layer, kept in zip(layers, cache.layers, strict=False):
        if kept.keys is not None:
            device = _computes_on(layer, model)
            kept.keys, kept.values = kept.keys.to(device), kept.values.to(device)


def _decoder_layers(model: Any) -> Any | None:
    """The decoder layers of a model with a device map; ``None`` for an encoder-decoder model."""
    if not hasattr(model, "hf_device_map") or getattr(model.config, "is_encoder_decoder", False):
        return None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return getattr(decoder, "layers", None)


def _computes_on(layer: Any, model: Any) -> Any:
    """The execution device of a layer: that of its hooks or, without hooks, of its weights."""
    for module in layer.modules():
        for hook in hooks_of(module):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return device
    device = next(layer.parameters()).device
    return input_device(model) if device.type == "meta" else device  # an outer hook onloads it
