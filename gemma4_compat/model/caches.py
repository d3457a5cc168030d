"""The cache that `generate` makes: its layers, and its name among the inputs of a model."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def cache_name() -> str:
    """The name of a cache among a model's inputs and outputs: ``cache`` since transformers 5.24."""
    from transformers.generation import utils

    names = getattr(utils, "ALL_CACHE_NAMES", ())
    return "cache" if "cache" in names else "past_key_values"


def shares_nothing(config: Any) -> bool:
    """Whether ``num_kv_shared_layers`` of a config is 0, as in 12B, 26B-A4B and 31B."""
    return getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", None) == 0


def with_all_layers(config: Any) -> Any:
    """A config from which a cache gets the layer types of all layers.

    Before transformers 5.14, a cache without shared layers gets none: ``layer_types[:-0]``.
    """
    if config is None or not shares_nothing(config):
        return config
    return _WithoutSharing(config.get_text_config(decoder=True))


def layers_by_kind(cache: Any) -> dict[str, list[Any]]:
    """The layers of a cache, by the name of their mask."""
    by_mask: dict[str, list[Any]] = {}
    for layer in cache.layers:
        if not hasattr(layer, "is_sliding"):
            continue  # a placeholder: this layer shares the keys and values of another
        name = "sliding_attention" if layer.is_sliding else "full_attention"
        by_mask.setdefault(name, []).append(layer)
    return by_mask


class _WithoutSharing:
    """A view of a decoder's config without ``num_kv_shared_layers``."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "num_kv_shared_layers":
            raise AttributeError(name)
        return getattr(self.config, name)
