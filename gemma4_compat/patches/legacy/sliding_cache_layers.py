"""In models without KV sharing, caches lose their layer types.

Layers that share the keys and values of earlier layers need no cache layer, so a cache drops their
types: ``layer_types[:-num_kv_shared_layers]``.  Gemma 4 12B, 26B-A4B and 31B have no such layers,
and ``layer_types[:-0]`` is empty.  A ``DynamicCache`` without layer types treats every layer as a
full-attention layer and keeps all tokens, where sliding layers need the last ``sliding_window``
only.  A ``StaticCache`` without layer types raises IndexError when it stores the first keys.

The fix makes the cache from a view of the config without ``num_kv_shared_layers``.  A
``DynamicCache`` is changed only where nobody but ``generate`` gets it.  A cache that the user makes
or gets keeps all tokens: code that crops it, or fills another one with its keys, relies on that.
So does ``generate`` itself in assisted generation and prompt lookup, which request a cache of full
layers.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from ...model.caches import shares_nothing, with_all_layers

PATCH = Patch(
    name="sliding_cache_layers",
    symptom=(
        "12B, 26B-A4B and 31B run out of memory in long contexts (31B: 24 GiB too much at 32k "
        'tokens); IndexError: list index out of range with cache_implementation="static"'
    ),
    affects=("transformers<5.14",),
    note="StaticCache is fixed earlier, in transformers 5.10.1.",
    links=("https://github.com/huggingface/transformers/pull/46235",),
)

_GENERATE = "transformers.generation.utils"
#: whether the user's own decoding method gets the cache
_is_custom: ContextVar[bool] = ContextVar("is_custom", default=False)


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


@PATCH.around("transformers.cache_utils", "StaticCache.__init__", when="transformers<5.10.1")
def static_cache(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    original(self, with_all_layers(config), *args, **kwargs)


@PATCH.around(_GENERATE, "GenerationMixin.generate")
def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("custom_generate") is None:
        return original(self, *args, **kwargs)
    token = _is_custom.set(True)
    try:
        return original(self, *args, **kwargs)
    finally:
        _is_custom.reset(token)


@PATCH.around(_GENERATE, "GenerationMixin._prepare_cache_for_generation")
def prepare_cache_for_generation(
    original: Any, self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
) -> Any:
    from transformers.cache_utils import DynamicCache

    given = model_kwargs.get("past_key_values")
    result = original(self, generation_config, model_kwargs, *args, **kwargs)
    cache, wanted = model_kwargs.get("past_key_values"), generation_config.cache_implementation
    if cache is not given and type(cache) is DynamicCache and shares_nothing(self.config):
        is_returned = generation_config.return_dict_in_generate or _is_custom.get()
        if wanted != "dynamic_full" and not is_returned:
            options = {"offloading": True} if wanted == "offloaded" else {}
            config = with_all_layers(self.config)
            model_kwargs["past_key_values"] = DynamicCache(config=config, **options)
    return result
