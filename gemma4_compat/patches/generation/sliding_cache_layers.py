"""In models without KV sharing, caches lose their layer types.

Layers that share the keys and values of earlier layers need no cache layer, so a cache drops their
types: ``layer_types[:-num_kv_shared_layers]``.  Gemma 4 12B, 26B-A4B and 31B have no such layers,
and ``layer_types[:-0]`` is empty.  A ``DynamicCache`` without layer types treats every layer as a
full-attention layer and keeps all tokens, where sliding layers need the last ``sliding_window``
only.  A ``StaticCache`` without layer types raises IndexError when it stores the first keys.

The fix builds the cache from a view of the config without ``num_kv_shared_layers``.  Assisted
generation and prompt lookup remove tokens from the cache, which a full sliding layer does not
support, so ``generate`` requests a cache of full layers.  transformers 5.12 and 5.13 build sliding
layers nevertheless, except, because of this bug, in models without KV sharing.  With the fix, these
models still get full layers.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed

PATCH = Patch(
    name="sliding_cache_layers",
    symptom=(
        "12B, 26B-A4B and 31B run out of memory in long contexts (31B: 24 GiB too much at 32k "
        'tokens); IndexError: list index out of range with cache_implementation="static"'
    ),
    affects=("transformers<5.14",),
    changes=(
        "DynamicCache and StaticCache keep all layer types of a config with num_kv_shared_layers=0."
    ),
    note="StaticCache is fixed earlier, in transformers 5.10.1.",
    links=("https://github.com/huggingface/transformers/pull/46235",),
)

_CACHES = "transformers.cache_utils"


@PATCH.probe
def all_layers_are_dropped() -> Finding:
    """Build a cache with one sliding layer."""
    from transformers.cache_utils import DynamicCache, PreTrainedConfig

    config = PreTrainedConfig(
        num_hidden_layers=1,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention"],
        sliding_window=4,
    )
    layers = DynamicCache(config=config).layers
    if not layers:
        return broken()
    if len(layers) == 1 and layers[0].is_sliding:
        return fixed("a cache keeps the layers of a model without KV sharing")
    return drifted(f"a cache of one sliding layer has the layers {layers}")


@PATCH.around(_CACHES, "DynamicCache.__init__")
def dynamic_cache(
    original: Any,
    self: Any,
    ddp_cache_data: Any = None,
    config: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    original(self, ddp_cache_data, _with_all_layers(config), *args, **kwargs)


@PATCH.around(_CACHES, "StaticCache.__init__", when="transformers<5.10.1")
def static_cache(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    original(self, _with_all_layers(config), *args, **kwargs)


@PATCH.around(
    "transformers.generation.utils",
    "GenerationMixin._prepare_cache_for_generation",
    when="transformers>=5.12",
)
def prepare_cache_for_generation(
    original: Any, self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
) -> Any:
    from transformers.cache_utils import DynamicCache

    given = model_kwargs.get("past_key_values")
    result = original(self, generation_config, model_kwargs, *args, **kwargs)
    cache = model_kwargs.get("past_key_values")
    if generation_config.cache_implementation == "dynamic_full" and cache is not given:
        if type(cache) is DynamicCache and _shares_nothing(self.config):
            model_kwargs["past_key_values"] = DynamicCache()
    return result


def _shares_nothing(config: Any) -> bool:
    return getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", None) == 0


def _with_all_layers(config: Any) -> Any:
    if config is None or not _shares_nothing(config):
        return config
    return _WithoutSharing(config.get_text_config(decoder=True))


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
