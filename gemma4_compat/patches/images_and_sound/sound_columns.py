"""An item of a sound column of ``datasets`` is no sound for a processor.

It is a dictionary with ``array`` and ``sampling_rate``, or since version 4 an ``AudioDecoder``.
Processors refuse both, or make arrays of objects of them; tensors and stereo fail in numpy.

The fix takes the samples out of an item.  It neither resamples nor mixes: another sampling rate
than the extractor's, or several channels, raise an error that says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...errors import InputError
from ._sound import check_rate, is_item, rate_of

PATCH = Patch(
    name="sound_columns",
    symptom=(
        "a sound column of datasets: ufunc 'rfft_n_even' not supported for the input types, or "
        "only a single or a list of entries is supported, or Incorrect format used for `audio`"
    ),
    affects=("transformers",),
    note="A processor with a __call__ of its own, as Gemma 4's before 5.10, is not covered.",
    links=(
        "https://github.com/unslothai/unsloth/issues/7226",
        "https://github.com/unslothai/unsloth-zoo/pull/917",
    ),
)

_MODULE = "transformers.processing_utils"


@PATCH.probe
def items_are_refused() -> Finding:
    """Load an item that is a dictionary."""
    from transformers.processing_utils import load_audio

    try:
        load_audio({"array": [0.0], "sampling_rate": 16000})
    except (TypeError, ValueError):
        return broken()
    return fixed("items of sound columns are taken")


@PATCH.around(_MODULE, "load_audio")
def load_audio(original: Any, audio: Any, sampling_rate: Any = 16000, *args: Any, **kw: Any) -> Any:
    if is_item(audio):
        audio = _samples(audio, sampling_rate)
    return original(audio, sampling_rate, *args, **kw)


@PATCH.around(_MODULE, "ProcessorMixin.__call__")
def processor_call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = rate_of(self)
    if wanted is not None and "audio" in kwargs:
        kwargs["audio"] = _samples(kwargs["audio"], wanted)
    return original(self, *args, **kwargs)


def _samples(audio: Any, wanted: Any) -> Any:
    """The array of a sound, or of each sound in a list; what has no shape stays as it is."""
    import numpy

    if getattr(getattr(audio, "dtype", None), "hasobject", False):
        audio = list(audio)
    if isinstance(audio, Sequence) and not isinstance(audio, str):
        is_sound = len(audio) > 0 and isinstance(audio[0], Real)
        return audio if is_sound else [_samples(each, wanted) for each in audio]
    if hasattr(audio, "get_all_samples"):
        decoded = audio.get_all_samples()
        audio = {"array": decoded.data, "sampling_rate": decoded.sample_rate}
    if isinstance(audio, dict) and "array" in audio:
        check_rate(audio.get("sampling_rate"), wanted)
        audio = numpy.asarray(audio["array"])
        if audio.dtype.kind in "iu":
            raise InputError(
                f"A sound is in {audio.dtype}, and the feature extractor takes numbers from -1 to "
                f"1: divide it by {numpy.iinfo(audio.dtype).max + 1} as float32."
            )
    if not hasattr(audio, "ndim"):
        return audio
    audio = numpy.asarray(audio)
    if audio.ndim == 2 and 1 in audio.shape:
        audio = audio.reshape(-1)
    if audio.ndim > 1:
        raise InputError(
            f"A sound of the shape {audio.shape} has several channels, the feature extractor takes "
            "one.  Pass one or, if they come first, sound.mean(axis=0); several sounds as a list."
        )
    return audio
