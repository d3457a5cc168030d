"""Arguments for the text reach the audio feature extractor, which ignores the sampling rate.

A processor passes an argument to all of its parts that have one of this name.  ``padding_side``
of ``from_pretrained`` turns the padding of sound round, and the extractors expect it on the right:
a sound in a batch gets other features than alone.  ``max_length=512`` leaves 32 ms of a sound.

The fix pads sound on the right.  What text and sound both have is for the text, and for the sound
if it is in ``audio_kwargs``.  A sampling rate that is not the extractor's raises an error.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ...objects import variant
from ._sound import check_rate, of_gemma, rate_of

PATCH = Patch(
    name="sound_arguments",
    symptom=(
        'padding_side="left", or max_length, gives other features of sound, without an error, or '
        "Audio features and audio tokens do not match; sampling_rate=48000 is ignored"
    ),
    affects=("transformers",),
    changes=(
        "Sound of Gemma 4 and 3n is padded on the right.  Padding, truncation and lengths of sound "
        "are taken from audio_kwargs only.  Another sampling rate raises an error."
    ),
    links=(
        "https://github.com/unslothai/unsloth/issues/6157",
        "https://github.com/unslothai/unsloth-zoo/pull/747",
    ),
)

_PROCESSING = "transformers.processing_utils"


@PATCH.probe
def padding_side_reaches_all_parts() -> Finding:
    """Check whether the code that passes arguments to the parts knows the padding side."""
    passing = code_at(_PROCESSING, "ProcessorMixin._get_arguments_from_pretrained")
    return fixed_if(mentions(passing, "padding_side"), "no other part gets the text's padding side")


@PATCH.around("transformers.feature_extraction_sequence_utils", "SequenceFeatureExtractor.pad")
def pad(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if of_gemma(self) and self.padding_side != "right":
        self = variant(self, padding_side="right")
    return original(self, *args, **kwargs)


@PATCH.around(_PROCESSING, "ProcessorMixin._merge_kwargs")
def merge_kwargs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    merged = original(self, *args, **kwargs)
    if of_gemma(self):
        from transformers.processing_utils import AudioKwargs, TextKwargs

        shared = {*TextKwargs.__annotations__}.intersection(AudioKwargs.__annotations__)
        of_text = {*shared, "tokenizer_init_kwargs"} - {"return_tensors"}
        others = {name: kwargs[name] for name in kwargs if name not in of_text}
        merged["audio_kwargs"] = original(self, *args[:1], **others)["audio_kwargs"]
        check_rate(merged["audio_kwargs"].get("sampling_rate"), rate_of(self))
    return merged
