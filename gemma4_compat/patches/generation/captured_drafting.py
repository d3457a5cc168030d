"""A drafter makes Gemma 4 slower: its rounds stay eager, and a static cache is refused.

``generate(assistant_model=...)`` and ``generate(prompt_lookup_num_tokens=...)`` let a model check
several drafted tokens in one forward.  transformers runs these rounds eagerly, with a dynamic
cache, while the GPU waits for Python: three drafts of ``gemma4_assistant`` and their check take
seven times as long as a captured step of one token.  With ``cache_implementation="static"``, it
raises an error: a static cache cannot remove the tokens of rejected drafts from sliding layers.

The fix gives such a call a static cache that can (``runtime/capture/rollback.py``).  It captures
the check, and the drafts of a ``gemma4_assistant``, as CUDA graphs
(``runtime/capture/drafting.py``); transformers' own loop accepts and rejects.  As in
``captured_decoding``, whose conditions hold here, too, the first round runs eagerly, and code of
the user keeps all rounds eager.

Greedy drafts are computed while transformers still reads which of the last ones are right.  So is
their check, on a second stream of the GPU, if all layers are on the GPU and only functions of
transformers run between two rounds (``runtime/capture/between_steps.py``): no streamer, stopping
criterion or logits processor of the user.  The last check of a call is one that nobody needs.

Greedy tokens are those of the same rounds without capture, bit for bit.  They may differ from those
of a dynamic cache, or of a call without drafts, by the rounding of other kernels.  Nothing changes
without ``cache_implementation="static"``, and with an assistant of another kind.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import cache as cached
from functools import partial
from typing import Any

from ...engine import Finding, Kind, Patch, broken, drifted, fixed
from ...engine.probing import code_at, mentions
from ...model.caches import cache_name, with_all_layers
from ...runtime.capture.between_steps import has_own_methods, only_transformers_runs
from ...runtime.capture.conditions import may_capture, streams_layers
from ...runtime.capture.decoding import decoding_of, warn_once
from ...runtime.kernels.watch import is_upstreams

PATCH = Patch(
    name="captured_drafting",
    kind=Kind.EXACT,
    symptom="ValueError: assisted generate is not supported with Static cache classes`",
    affects=("transformers>=5.8",),
    requires=("captured_decoding", "static_cache_full_window"),
    unreported="transformers refuses such a cache on purpose.",
)

_GENERATION = "transformers.generation.utils"
_MAKES_DRAFTS = "_get_candidate_generator"
_DRAFTERS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")


@PATCH.probe
def transformers_refuses_a_static_cache() -> Finding:
    """Look at which caches ``_assisted_decoding`` takes, and whether it uses what is replaced."""
    code = code_at(_GENERATION, "GenerationMixin._assisted_decoding")
    missing = {_MAKES_DRAFTS, "get_candidates", "crop"} - set(code.co_names)
    if missing:
        return drifted(f"GenerationMixin._assisted_decoding does not use {sorted(missing)}")
    if not (mentions(code, "StaticCache") or mentions(code, "is_croppable")):
        return fixed("transformers takes a static cache")
    return broken()


@PATCH.around(_GENERATION, "GenerationMixin._prepare_cache_for_generation")
def prepare_cache_for_generation(
    original: Any,
    self: Any,
    generation_config: Any,
    model_kwargs: Any,
    generation_mode: Any,
    batch_size: Any,
    max_cache_length: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if (
        getattr(generation_mode, "value", None) == "assisted_generation"
        and generation_config.cache_implementation == "static"
        and model_kwargs.get(cache_name()) is None
        and _can_draft(self, generation_config)
    ):
        from ...runtime.capture.rollback import RollbackCache

        longest = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
        config = with_all_layers(self.config.get_text_config(decoder=True))
        model_kwargs[cache_name()] = RollbackCache(config, longest)
        return None
    given = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
    return original(self, *given, *args, **kwargs)


@PATCH.around(_GENERATION, "GenerationMixin._assisted_decoding")
def assisted_decoding(original: Any, self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    cache: Any = kwargs.get(cache_name())
    if type(cache).__name__ != "RollbackCache" or cache.tokens:  # of an earlier call
        return original(self, input_ids, *args, **kwargs)

    from ...runtime.capture.drafting import Drafting

    config: Any = kwargs.get("generation_config")
    drafter = kwargs.get("assistant_model")
    drafts = _drafts_of(config, drafter)
    if not drafts:  # transformers refuses its own static cache, or can crop it
        from transformers.cache_utils import StaticCache

        text = with_all_layers(self.config.get_text_config(decoder=True))
        kwargs[cache_name()] = StaticCache(config=text, max_cache_len=cache.longest)
        return original(self, input_ids, *args, **kwargs)
    alone = only_transformers_runs(self, kwargs)
    ahead = only_transformers_runs(self, kwargs, ahead=True) and not streams_layers(self)
    cache.make_room(2 * (drafts + 1))  # of this check and the next; a ring's length can round
    decoding_of(self).lend(cache, 1)
    if config.prompt_lookup_num_tokens is not None:
        drafter = None
    kwargs["generation_config"] = copy.copy(config)
    kwargs["generation_config"].cache_implementation = None  # transformers refuses a static one
    with ExitStack() as stack:
        warn = partial(warn_once, "rounds", self)
        for_decode = stack if _switches_experts() else None
        drafting = Drafting(self, cache, drafts, drafter, warn, for_decode, alone, ahead)
        stack.callback(drafting.end)
        return original(drafting, input_ids, *args, **kwargs)


@cached
def _switches_experts() -> bool:
    """Whether transformers chooses another implementation of experts for the checks."""
    code = code_at(_GENERATION, "GenerationMixin._assisted_decoding")
    return "_optimize_model_for_decode" in code.co_names


def _can_draft(model: Any, generation_config: Any) -> bool:
    """Whether this model, on a GPU, has functions of transformers alone."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind, text = type(model), model.config.get_text_config(decoder=True)
    tables = (ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS)
    functions = [
        kind.forward, getattr(model, _MAKES_DRAFTS, None),
        *(table.get(text._attn_implementation) for table in tables),
    ]  # fmt: skip
    return (
        may_capture(model, generation_config)
        and text._attn_implementation == "sdpa"
        and model.get_output_embeddings() is not None
        and all(map(is_upstreams, functions))
        and not has_own_methods(model)
        and generation_config.use_cache is not False
    )


def _drafts_of(generation_config: Any, drafter: Any) -> int:
    """The largest number of drafts in a round; 0 if these drafts are not captured."""
    if generation_config is None or generation_config.assistant_early_exit is not None:
        return 0
    if getattr(generation_config, "assistant_ensemble_weight", None) is not None:
        return 0  # the logits of the drafter change the tokens
    if generation_config.prompt_lookup_num_tokens is not None:
        return int(generation_config.prompt_lookup_num_tokens)
    from transformers.generation import candidate_generator

    kind, own = type(drafter), getattr(drafter, "__dict__", {})
    generator = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    if kind.__name__ not in _DRAFTERS or "forward" in own or "create_attention_masks" in own:
        return 0
    usual = kind.forward, kind.create_attention_masks, generator.get_candidates, generator.__init__
    sdpa = drafter.config.get_text_config()._attn_implementation == "sdpa"
    number = drafter.generation_config.num_assistant_tokens
    return int(number) if sdpa and all(map(is_upstreams, usual)) else 0
