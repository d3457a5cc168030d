"""Says whether only functions of transformers run between two steps of ``generate``.

Only then a step may begin before ``generate`` asks for it: nobody notices one that is not needed.
"""

from __future__ import annotations

from typing import Any

from ..kernels.watch import is_upstreams

#: Of the model: what runs between two steps.
_METHODS = (
    "prepare_inputs_for_generation", "create_masks_for_generate",
    "_update_model_kwargs_for_generation", "_has_unfinished_sequences",
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
_STREAMERS = ("TextStreamer", "TextIteratorStreamer", "AsyncTextIteratorStreamer")


def has_own_methods(model: Any) -> bool:
    """Whether a user's method runs between two steps, and may change what they get."""
    places = vars(model), *map(vars, type(model).__mro__)
    return not all(is_upstreams(place.get(name)) for place in places for name in _METHODS)


def only_transformers_runs(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether this is so in ``_sample`` or ``_assisted_decoding``, called with these arguments."""
    lists: list[Any] = [arguments.get("logits_processor"), arguments.get("stopping_criteria")]
    streamer = arguments.get("streamer")
    return (
        not arguments.get("synced_gpus")
        and not has_own_methods(model)
        and all(_is_own(each, _LISTS) for each in lists)
        and all(_is_own(each, _STATELESS) for processors in lists for each in processors)
        and (streamer is None or _is_own_streamer(streamer))
    )


def _is_own(value: Any, names: tuple[str, ...], functions: tuple[str, ...] = ("__call__",)) -> bool:
    """Whether this is of one of these classes of transformers, with its functions as they are."""
    kind = type(value)
    return (
        kind.__module__.startswith("transformers.generation.")
        and kind.__name__ in names
        and all(is_upstreams(getattr(kind, name)) for name in functions)
        and vars(value).keys().isdisjoint(functions)
    )


def _is_own_streamer(streamer: Any) -> bool:
    if not _is_own(streamer, _STREAMERS, ("put", "end", "on_finalized_text")):
        return False
    queue = getattr(streamer, "text_queue", None)
    if queue is not None and not is_upstreams(type(queue).put):
        return False
    tokenizer = streamer.tokenizer
    kind = type(tokenizer)
    is_plain = kind.__module__.startswith("transformers.") and "decode" not in vars(tokenizer)
    return is_plain and is_upstreams(kind.decode)
