"""Prefix tuning fails on every split Gemma 4, and on models without any GPU in their map.

PEFT brings the prefix, a cache of keys and values, to the devices of the decoder layers.  It reads
these off ``hf_device_map``: the first device that is neither "cpu" nor "disk" stands for offloaded
layers, and there need not be one (``StopIteration``).  It reads ``config.num_hidden_layers``, which
the config of a multimodal model does not have.  It takes every name in the map that holds a number
for a decoder layer, that of a vision tower's layer as well.

The fix asks the decoder layers where they compute.
"""

from __future__ import annotations

from functools import wraps
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
    changes=(
        "The prefix of prefix tuning goes to the devices that the decoder layers of a split model "
        "execute on."
    ),
    links=(
        "https://github.com/huggingface/peft/issues/3619",
        "https://github.com/huggingface/peft/pull/3621",
    ),
)


@PATCH.probe
def no_device_but_cpu_and_disk() -> Finding:
    """Ask for the devices of a multimodal model that is offloaded as a whole."""
    from types import SimpleNamespace

    from peft.utils.integrations import get_layer_device_map

    text = SimpleNamespace(num_hidden_layers=1)
    config = SimpleNamespace(get_text_config=lambda *args, **kwargs: text)
    model = SimpleNamespace(hf_device_map={"": "cpu"}, config=config)
    try:
        found = get_layer_device_map(model)
    except (StopIteration, IndexError, AttributeError):
        return broken()
    if found == {0: "cpu"}:
        return fixed("PEFT finds the devices of decoder layers")
    return drifted(f"the devices of a model on the CPU are {found}")


@PATCH.replaces("peft.peft_model", "map_cache_to_layer_device_map")
def map_cache_to_layer_device_map(original: Any) -> Any:
    @wraps(original)
    def map_cache_to_layer_device_map(model: Any, cache: Any) -> None:
        layers = _decoder_layers(model)
        if layers is None or not hasattr(cache, "layers"):
            original(model, cache)
            return
        # Layers that share keys and values have none in the cache.
        for layer, kept in zip(layers, cache.layers, strict=False):
            if kept.keys is not None:
                device = _computes_on(layer, model)
                kept.keys, kept.values = kept.keys.to(device), kept.values.to(device)

    return map_cache_to_layer_device_map


def _decoder_layers(model: Any) -> Any | None:
    """The layers of a model that was placed by a map, if it is a decoder alone."""
    if not hasattr(model, "hf_device_map") or getattr(model.config, "is_encoder_decoder", False):
        return None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return getattr(decoder, "layers", None)


def _computes_on(layer: Any, model: Any) -> Any:
    """The device of a layer's hook, or else of its weights."""
    for module in layer.modules():
        for hook in hooks_of(module):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return device
    device = next(layer.parameters()).device
    return input_device(model) if device.type == "meta" else device  # loaded with what is around it
