"""The parts of a Gemma 4 model, as the names of its modules and tensors show them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

LAYERS, PLE, EMBEDDINGS, VISION, AUDIO, REST = (
    "decoder layers", "per-layer embeddings", "token embeddings", "vision", "audio", "the rest",
)  # fmt: skip
#: in the order in which tables list them
PARTS = (LAYERS, PLE, EMBEDDINGS, VISION, AUDIO, REST)
TOWERS = ("language", "vision", "audio", "other")
#: the beginnings of the modules with the classes of Gemma 4, its variants and Gemma 3n
MODELS = ("transformers.models.gemma3n", "transformers.models.gemma4")


def is_ours(model: Any) -> bool:
    """Whether this is a model of transformers of Gemma 4, its variants or Gemma 3n."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    return str(model_type).startswith(("gemma3n", "gemma4"))


def base_of(model: Any) -> Any:
    """The model that a PEFT model wraps; any other model itself."""
    if not hasattr(model, "get_base_model"):
        return model
    try:
        return model.get_base_model()
    except KeyError:  # its last adapter was deleted, and PEFT asks that one's config
        return model.base_model.model


@lru_cache(2**14)  # a plan asks for the same tensors many times
def part_of(name: str) -> str:
    """The part of the model that a module or tensor of this name belongs to."""
    path = name.split(".")
    if "embed_tokens_per_layer" in path:
        return PLE
    if any(step.startswith("vision") or step.endswith("_vision") for step in path):
        return VISION
    if any(step.startswith("audio") or step.endswith("_audio") for step in path):
        return AUDIO
    if "embed_tokens" in path or "lm_head" in path:
        return EMBEDDINGS
    return LAYERS if re.search(r"(^|\.)layers\.\d+(\.|$)", name) else REST


def is_under(name: str, modules: Iterable[str]) -> bool:
    """Whether ``name`` is one of these modules, or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def tower_of(name: str) -> str:
    """ "language", "vision", "audio" or "other", for a module's or tensor's name."""
    part = part_of(name)
    if part in (VISION, AUDIO):
        return part
    return "language" if part != REST or "language_model" in name.split(".") else "other"


def decoder_layers(modules: Iterable[str]) -> dict[int, str]:
    """The names of the decoder layers among these modules, by their index."""
    layers = {}
    for name in modules:
        if not name[-1:].isdigit():  # as of nearly all
            continue
        layer = re.search(r"(?:^|\.)layers\.(\d+)$", name)
        if layer is not None and part_of(name) == LAYERS:
            layers[int(layer[1])] = name
    return layers


def layer_of(name: str) -> tuple[str, str] | None:
    """The stack and the name of the layer of a module or tensor: ("layers", "layers.3")."""
    path = name.split(".")
    number = next((i for i, step in enumerate(path) if step.isdigit()), None)
    if number is None:
        return None
    return ".".join(path[:number]), ".".join(path[: number + 1])


def shared_layers(config: Any) -> range:
    """The indices of the decoder layers that use keys and values of earlier layers."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None) or 0
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    return range(layers - shared, layers)


def is_shared_kv(name: str, shared: range) -> bool:
    """Whether this belongs to a KV-shared decoder layer's own keys or values, which are unused."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.self_attn\.[kv]_(proj|norm)(\.|$)", name)
    return match is not None and int(match[1]) in shared and tower_of(name) == "language"


def is_clippable(module: Any) -> bool:
    """Whether a module is a ``Gemma4ClippableLinear``, which has the linear layer as ``linear``.

    Its copies in related models, and subclasses of either, count too.
    """
    return "linear" in module._modules and any(
        cls.__name__.endswith("ClippableLinear") for cls in type(module).__mro__
    )


def fused_experts(modules: Mapping[str, Any]) -> Iterator[str]:
    """The names of the parameters in these modules that contain all experts of a layer."""
    for name, module in modules.items():
        if type(module).__name__.endswith("Experts"):
            for own, parameter in module.named_parameters(recurse=False):
                # the shape of the values, if they are packed in 4 bits
                shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
                if len(parameter.shape if shape is None else shape) == 3:
                    yield f"{name}.{own}"


def experts_without_adapter(modules: Mapping[str, Any], adapted: Iterable[str]) -> list[str]:
    """The fused experts in layers whose dense MLP has an adapter; ``adapted`` are module names."""
    projections = (name for name in adapted if name.endswith(("gate_proj", "up_proj", "down_proj")))
    beside = {name.rpartition(".mlp.")[0] for name in projections}
    return [name for name in fused_experts(modules) if name.split(".experts.")[0] in beside]


def target_parameters(names: Iterable[str]) -> tuple[list[str], int]:
    """The ``target_parameters`` of PEFT that match these parameters, and the number of layers."""
    steps = [name.split(".") for name in names]
    return sorted({".".join(each[-2:]) for each in steps}), len({tuple(s[:-1]) for s in steps})
