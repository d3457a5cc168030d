"""Arguments for the text reach the audio feature extractor, which ignores the sampling rate.

A processor passes an argument to all of its parts that have one of this name.  ``padding_side``
of ``from_pretrained`` turns the padding of sound round, and the extractors expect it on the right:
a sound in a batch gets other features than alone.  ``max_length=512`` leaves 32 ms of a sound.

The fix pads sound on the right.  A length that is not in ``audio_kwargs`` cuts no sound, and what
the extractor cannot do for it stays with the text.  A feature extractor takes neither another
sampling rate than its own nor an item of a sound column, which is no sound.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ...errors import InputError
from ...objects import variant
from .._families import FAMILIES
from ._sound import check_rate, is_item, is_upstreams, of_gemma, rate_of

PATCH = Patch(
    name="sound_arguments",
    symptom=(
        'padding_side="left", or max_length, gives other features of sound, without an error, or '
        "Audio features and audio tokens do not match; sampling_rate=48000 is ignored"
    ),
    affects=("transformers",),
    links=(
        "https://github.com/unslothai/unsloth/issues/6157",
        "https://github.com/unslothai/unsloth-zoo/pull/747",
    ),
)

_PROCESSING = "transformers.processing_utils"


class _ForText(int):
    """A ``max_length`` for the text, which may pad a sound but must not cut it."""


@PATCH.probe
def padding_side_reaches_all_parts() -> Finding:
    """Check whether the code that passes arguments to the parts knows the padding side."""
    passing = code_at(_PROCESSING, "ProcessorMixin._get_arguments_from_pretrained")
    return fixed_if(mentions(passing, "padding_side"), "no other part gets the text's padding side")


@PATCH.around("transformers.feature_extraction_sequence_utils", "SequenceFeatureExtractor.pad")
def pad(
    original: Any, self: Any, processed_features: Any, padding: Any = True,
    max_length: Any = None, truncation: Any = False, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    if of_gemma(self) and self.padding_side != "right":
        self = variant(self, padding_side="right")
    if isinstance(max_length, _ForText) and truncation:
        own = _longest(self)
        sounds = processed_features["input_features"] if own else processed_features
        length = max(len(each if own else each["input_features"]) for each in sounds)
        if max_length < min(length, own or length):
            padding, max_length, truncation = padding and "longest", own, own is not None
    return original(self, processed_features, padding, max_length, truncation, *args, **kwargs)


@PATCH.around(_PROCESSING, "ProcessorMixin._merge_kwargs")
def merge_kwargs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    merged = original(self, *args, **kwargs)
    extractor = getattr(self, "feature_extractor", None)
    if of_gemma(self) and of_gemma(extractor):
        sound = merged["audio_kwargs"]
        own = {*kwargs.get("common_kwargs", {}), *kwargs.get("audio_kwargs", {})}
        given = {*kwargs, *(kwargs.get("tokenizer_init_kwargs") or ())} - own
        if "max_length" in given and (length := sound.pop("max_length", None)) is not None:
            sound["max_length"] = _ForText(length)
        pads = sound.get("padding") == "max_length" and sound.get("max_length") is not None
        if pads or _longest(extractor):
            given.discard("padding")  # what is left is an error in the extractor
        for name in given & {"padding", "return_attention_mask"}:
            sound.pop(name, None)
        if rate_of(self) is None and is_upstreams(extractor):
            sound.pop("sampling_rate", None)  # a user's code has read it
    return merged


def _longest(extractor: Any) -> int | None:
    """The samples to which an extractor cuts a sound; Gemma 4 unified takes all, as frames."""
    return None if hasattr(extractor, "audio_samples_per_token") else 480_000


def extractor_call(original: Any, self: Any, raw_speech: Any, *args: Any, **kwargs: Any) -> Any:
    if is_item(raw_speech) or is_item(next(iter(raw_speech), None)):
        raise InputError(
            "An item of a sound column is no sound for a feature extractor.  Pass item['array'] in "
            "a list, and sampling_rate=item['sampling_rate']."
        )
    if is_upstreams(self):
        check_rate(kwargs.get("sampling_rate"), self.sampling_rate)
    return original(self, raw_speech, *args, **kwargs)


for each in FAMILIES:
    module = each.module.replace("modeling_", "feature_extraction_")
    part = PATCH.part(each.name, each.requirement)
    part.around(module, f"{each.prefix}AudioFeatureExtractor.__call__")(extractor_call)
