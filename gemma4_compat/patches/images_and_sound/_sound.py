"""Whose sound the patches check, and the check of its sampling rate."""

from __future__ import annotations

from numbers import Real
from typing import Any

from ...errors import InputError
from .._families import FAMILIES

_MODULES = tuple(each.module.rpartition("modeling_")[0] for each in FAMILIES)


def of_gemma(instance: Any) -> bool:
    """Whether a processor or feature extractor is of these families, perhaps a subclass."""
    return any(cls.__module__.startswith(_MODULES) for cls in type(instance).__mro__)


def is_item(audio: Any) -> bool:
    """Whether it is an item of a sound column."""
    return isinstance(audio, dict) or hasattr(audio, "get_all_samples")


def is_upstreams(extractor: Any) -> bool:
    """Whether an extractor of these families is called without a user's code."""
    return of_gemma(extractor) and type(extractor).__call__.__module__.startswith(_MODULES)


def rate_of(processor: Any) -> Any:
    """The sampling rate in Hz that sound must have; ``None`` if a user's code reads the sound."""
    extractor: Any = getattr(processor, "feature_extractor", None)
    ours = of_gemma(processor) and is_upstreams(extractor)
    ours = ours and type(processor).__call__.__module__.startswith("transformers.")
    return extractor.sampling_rate if ours else None


def check_rate(rate: Any, wanted: Any) -> None:
    """Raise an ``InputError`` if a sound has another sampling rate, in Hz, than is wanted."""
    if isinstance(rate, Real) and wanted and rate != wanted:
        raise InputError(
            f"The sound has {rate:g} samples a second, and the feature extractor wants {wanted}: "
            f"the model would hear it {rate / wanted:.3g} times as long.  Resample it first: "
            f"librosa.resample(sound, orig_sr={rate:g}, target_sr={wanted}) or, for a column of a "
            f'data set, dataset.cast_column("audio", datasets.Audio(sampling_rate={wanted})).'
        )
