"""Says whether only functions of transformers run between two steps of ``generate``.

Other code may change the model, so the model is compared before each step.  And a step may begin
before ``generate`` asks for it only if nobody notices one that is not needed.
"""

from __future__ import annotations

from typing import Any

from ..kernels.watch import is_upstreams

#: Of the model: what runs between two steps, or gets the cache and may keep it.
_METHODS = (
    "prepare_inputs_for_generation", "create_masks_for_generate",
    "_update_model_kwargs_for_generation", "_has_unfinished_sequences",
    "_prefill", "_prepare_cache_for_generation", "_prepare_static_cache",
)  # fmt: skip
_LISTS = ("LogitsProcessorList", "StoppingCriteriaList")
#: Logits processors and stopping criteria that keep nothing from one step to another, and cannot
#: raise after the end of a text.
_STATELESS = (
    "EpsilonLogitsWarper", "EtaLogitsWarper",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization",
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TypicalLogitsWarper",
    "EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria",
)  # fmt: skip
#: Others, which do not read the model or run code of a user.
_OTHERS = (
    "ConfidenceCriteria", "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor", "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor", "TopHLogitsWarper", "WatermarkLogitsProcessor",
)  # fmt: skip
#: Of the stateless ones, those that may leave no token to sample after the end of a text.
_BANNING = (
    "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor",
)  # fmt: skip
_STREAMERS = ("TextStreamer", "TextIteratorStreamer", "AsyncTextIteratorStreamer")
#: The modules of a streamer's queue, and what puts a text into it.
_QUEUES, _PUTS = ("queue", "asyncio.queues"), ("put", "put_nowait", "_put")


def has_own_methods(model: Any) -> bool:
    """Whether a user's method runs between two steps, or may keep the cache."""
    places = vars(model), *map(vars, type(model).__mro__)
    return not all(is_upstreams(place.get(name)) for place in places for name in _METHODS)


def only_transformers_runs(model: Any, arguments: dict[str, Any], ahead: bool = False) -> bool:
    """Whether this is so in ``_sample`` or ``_assisted_decoding``, called with these arguments.

    Args:
        ahead: ask whether nobody notices a step that is not needed, either.
    """
    lists: list[Any] = [arguments.get("logits_processor"), arguments.get("stopping_criteria")]
    streamer, config = arguments.get("streamer"), arguments.get("generation_config")
    allowed = {*_STATELESS, *_OTHERS}
    if ahead:
        allowed.difference_update(_OTHERS, _BANNING if getattr(config, "do_sample", False) else ())
    return (
        not (ahead and arguments.get("synced_gpus"))
        and not has_own_methods(model)
        and all(_is_own(each, _LISTS) for each in lists)
        and all(_is_own(each, allowed) for processors in lists for each in processors)
        and (streamer is None or _is_own_streamer(streamer))
    )


def _is_own(value: Any, names: Any, functions: tuple[str, ...] = ("__call__",)) -> bool:
    """Whether this is of one of these classes of transformers, with its functions as they are."""
    kind = type(value)
    return (
        kind.__module__.startswith("transformers.generation.")
        and kind.__name__ in names
        and all(is_upstreams(getattr(kind, name)) for name in functions)
        and not _has(value, *functions)
    )


def _has(instance: Any, *names: str) -> bool:
    """Whether it has a function of its own with one of these names."""
    return not vars(instance).keys().isdisjoint(names)


def _is_own_streamer(streamer: Any) -> bool:
    if not _is_own(streamer, _STREAMERS, ("put", "end", "on_finalized_text")):
        return False
    queue = getattr(streamer, "text_queue", None)
    if queue is not None:
        kind = type(queue)
        if kind.__module__ not in _QUEUES or not is_upstreams(kind.put) or _has(queue, *_PUTS):
            return False
    kind = type(streamer.tokenizer)
    is_plain = kind.__module__.startswith("transformers.") and is_upstreams(kind.decode)
    return is_plain and not _has(streamer.tokenizer, "decode", "_decode")
