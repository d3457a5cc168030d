"""Says whether only functions of transformers run between two steps of ``generate``.

Other code may change the model, so the model is compared before each step.  And a step may begin
before ``generate`` asks for it only if nobody notices one that is not needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from ..kernels.watch import KNOWN, is_known, is_upstreams, uses_of, wrapped_by

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
#: Functions that were found to call only functions of known libraries, and what they call by name.
_checked: tuple[list[Any], list[tuple[Any, str, Any]]] = [], []


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
        and _are_plain(arguments.values())
        and _call_only_libraries(_functions(model, lists))
    )


def _functions(model: Any, lists: list[Any]) -> list[Any]:
    """Those of transformers that run between two steps, but for the streamer's."""
    from transformers.generation import utils

    checks = (getattr(utils, name, None) for name in ("StopCheck", "DeferredStopCheck"))
    kinds = (
        *filter(None, checks),
        *map(type, lists),
        *(type(each) for own in lists for each in own),
    )
    methods = (getattr(type(model), name, None) for name in ("_sample", *_METHODS))
    return [*filter(None, methods), *(each.__call__ for each in kinds)]


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


def _are_plain(arguments: Iterable[Any]) -> bool:
    """Whether no tensor is of a subclass, whose functions may run in each operation."""
    import torch

    return all(type(each) is torch.Tensor for each in arguments if isinstance(each, torch.Tensor))


def _call_only_libraries(functions: list[Any]) -> bool:
    """Whether these functions, all that they call by name, and all that calls, is of libraries.

    A user's function in the place of one of PyTorch may count its calls, or draw random numbers.
    """
    global _checked
    import torch

    before, known = _checked
    refs = [*map(weakref.ref, functions)]
    if refs == before and all(_kept(entries.get(name)) is value for entries, name, value in known):
        return True
    tensor, called = vars(torch.Tensor), functions
    operators = (name for name in dir(torch.Tensor) if name.startswith("__"))
    uses = [(tensor, name, tensor.get(name), "Tensor") for name in operators]
    for _ in range(2):
        every = [each for function in called for each in wrapped_by(function)]
        plain = [each for each in every if type(each) is FunctionType]
        found = uses_of((each.__code__, each.__globals__) for each in plain).values()
        called = [value for _, _, value, _ in found]
        uses += found
    if not all(map(_is_of_library, (*functions, *(value for _, _, value, _ in uses)))):
        return False
    _checked = refs, [(entries, name, _kept(value)) for entries, name, value, _ in uses]
    return True


def _kept(value: Any) -> Any:
    """The value, or the one weak reference to a function: it may be of a patch, or be replaced."""
    return weakref.ref(value) if type(value) is FunctionType else value


def _is_of_library(value: Any) -> bool:
    """Whether a value is of a known library or built into Python, as is each that it wraps."""
    for each in wrapped_by(value):
        kind = type(each)
        if kind is FunctionType:
            if not is_known(each.__code__, each.__globals__):
                return False
        elif kind.__name__ == "_lru_cache_wrapper":
            return _is_of_library(each.__wrapped__)
        elif not issubclass(kind, type):
            if kind.__module__.partition(".")[0] not in (*KNOWN, "builtins"):
                return False
    return True
