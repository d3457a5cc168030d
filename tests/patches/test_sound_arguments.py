"""Features of sound depend on the sound alone, and on what is in ``audio_kwargs``.

The reference is the feature extractor, called on each sound alone.  Gemma 3n's marks up to three
frames of padding as sound, so only the frames that a sound has alone are compared.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import gemma4_compat
from tests.sound import (
    FAMILIES,
    alone,
    assert_features,
    extractor_class,
    processor,
    processor_class,
    tokenizer,
    waves,
)

families = pytest.mark.parametrize("family", FAMILIES)
#: 99 and 300 frames; neither is a multiple of the extractor's padding
LENGTHS = (16001, 48123)
#: What text and sound both have, and values for the text.
SHARED = {
    "max_length": {"max_length": 20},
    "padding": {"padding": "max_length", "max_length": 20},
    "truncation": {"truncation": True, "max_length": 1024},
    "pad_to_multiple_of": {"pad_to_multiple_of": 8},
    "return_attention_mask": {"return_attention_mask": False},
}
#: Those that change nothing without the patch: 1024 frames are 41 seconds of Gemma 4 unified.
HARMLESS = {
    "gemma3n": {"pad_to_multiple_of"},
    "gemma4": {"pad_to_multiple_of"},
    "gemma4_unified": {"pad_to_multiple_of", "return_attention_mask", "truncation"},
}
#: What else sound has.  The extractors compute with numpy, so they need no device.
OF_SOUND = {"device", "load_audio_backend", "raw_speech", "return_tensors", "sampling_rate"}
WRONG = "the features of a sound differ by|sound is cut to"


def call(processor, sounds, **kwargs):
    kwargs = {
        "return_tensors": "np",
        "padding": True,
        "text": ["a <|audio|>"] * len(sounds),
        **kwargs,
    }
    return processor(audio=sounds, **kwargs)


def references(family, sounds):
    return [alone(family, sound) for sound in sounds]


@pytest.mark.regression("sound_arguments", WRONG)
@families
def test_padding_side_of_an_extractor(family, tmp_path):
    extractor_class(family)().save_pretrained(tmp_path)
    extractor = extractor_class(family).from_pretrained(tmp_path, padding_side="left")
    sounds = waves(*LENGTHS)
    found = extractor(sounds, return_tensors="np")
    assert_features(found, references(family, sounds))
    right = extractor_class(family)()(sounds, return_tensors="np")
    np.testing.assert_array_equal(found["input_features_mask"], right["input_features_mask"])
    assert extractor.padding_side == "left", "the object is as the user made it"


@pytest.mark.regression("sound_arguments", WRONG)
@families
def test_padding_side_of_a_processor(family, tmp_path):
    """As in transformers' page of Gemma 4; then saved and loaded once more."""
    processor(family).save_pretrained(tmp_path)
    loaded = processor_class(family).from_pretrained(tmp_path, padding_side="left")
    loaded.save_pretrained(tmp_path / "again")
    sounds = waves(*LENGTHS)
    plain = [call(processor(family), [sound]) for sound in sounds]
    for each in (loaded, processor_class(family).from_pretrained(tmp_path / "again")):
        outputs = call(each, sounds)
        assert each.tokenizer.padding_side == "left"
        assert_features(outputs, references(family, sounds))
        for ids, expected in zip(outputs["input_ids"], plain, strict=True):
            assert (
                ids.tolist()[-expected["input_ids"].shape[1] :] == expected["input_ids"][0].tolist()
            )


def check_shared(family, name):
    sounds = waves(*LENGTHS)
    assert_features(call(processor(family), sounds, **SHARED[name]), references(family, sounds))


@pytest.mark.regression("sound_arguments", f"{WRONG}|AttributeError")
@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family in FAMILIES for name in SHARED if name not in HARMLESS[family]],
)
def test_arguments_for_the_text(family, name):
    check_shared(family, name)


@families
def test_harmless_arguments_for_the_text(family):
    for name in HARMLESS[family]:
        check_shared(family, name)


def test_every_argument_is_in_these_tables():
    """A release with more arguments needs a decision for each."""
    from transformers.processing_utils import AudioKwargs, TextKwargs

    sound, text = set(AudioKwargs.__annotations__), set(TextKwargs.__annotations__)
    assert sound & text - {"return_tensors"} == set(SHARED)
    assert sound - set(SHARED) <= OF_SOUND


@families
def test_every_argument_of_from_pretrained(family):
    """Of what an extractor stores, only the padding side has a meaning for the tokenizer."""
    made = processor(family)
    stored = vars(made.feature_extractor)
    assert {name for name in stored if hasattr(made.tokenizer, name)} <= {
        "padding_side", "_processor_class",
    }  # fmt: skip


@pytest.mark.regression("sound_arguments", WRONG)
@families
def test_max_length_of_a_saved_tokenizer(family, tmp_path):
    processor(family).save_pretrained(tmp_path)
    loaded = processor_class(family).from_pretrained(tmp_path, max_length=20)
    sounds = waves(*LENGTHS)
    assert_features(call(loaded, sounds), references(family, sounds))


@families
def test_audio_kwargs(family):
    """What is meant for the sound is heeded as without the patch."""
    unit = 1 if family == "gemma4_unified" else 640
    cut = {"max_length": 10 * unit, "truncation": True}
    sounds = waves(*LENGTHS)
    found = call(processor(family), sounds, audio_kwargs=cut, text_kwargs={"max_length": 512})
    expected = extractor_class(family)()(sounds, return_tensors="np", **cut)
    for name in ("input_features", "input_features_mask"):
        np.testing.assert_array_equal(found[name], expected[name])
    with gemma4_compat.disabled("sound_arguments"):
        without = call(processor(family), sounds, audio_kwargs=cut)
    np.testing.assert_array_equal(found["input_features"], without["input_features"])


def by_call(processor, sound, rate):
    return call(processor, [sound], sampling_rate=rate)


def by_audio_kwargs(processor, sound, rate):
    return call(processor, [sound], audio_kwargs={"sampling_rate": rate})


def by_chat(processor, sound, rate):
    chat = [{"role": "user", "content": [{"type": "audio", "audio": sound}]}]
    given = {"tokenize": True, "return_dict": True, "processor_kwargs": {"sampling_rate": rate}}
    return processor.apply_chat_template(chat, **given)


@pytest.mark.regression("sound_arguments", "DID NOT RAISE")
@families
@pytest.mark.parametrize(
    ("rate", "pass_on"), [(48000, by_call), (44100, by_audio_kwargs), (8000, by_chat)]
)
def test_another_sampling_rate(rate, pass_on, family):
    """One second of sound would become as many frames as ``rate / 16000`` seconds."""
    made = processor(family)
    [sound] = waves(rate)
    message = rf"{rate} samples a second.* wants 16000.* {rate / 16000:.3g} times.*librosa.resample"
    with pytest.raises(gemma4_compat.InputError, match=message):
        pass_on(made, sound, rate)


@families
def test_the_right_sampling_rate(family):
    sounds = waves(*LENGTHS)
    found = call(processor(family), sounds, sampling_rate=16000)
    assert_features(found, references(family, sounds))


@families
def test_code_of_users_that_reads_the_rate(family):
    """A subclass of the extractor that resamples gets its rate and what it asks for."""

    class Halves(extractor_class(family)):
        def __call__(self, sounds, sampling_rate=None, **kwargs):
            if sampling_rate == 32000:
                sounds = [sound[::2] for sound in sounds]
            return super().__call__(sounds, **kwargs)

    class Inherits(extractor_class(family)):
        pass

    sounds = waves(*LENGTHS)
    twice = [np.repeat(sound, 2) for sound in sounds]
    made = processor(family, Halves(padding_side="left"))
    assert_features(call(made, twice, sampling_rate=32000), references(family, sounds))
    with pytest.raises(gemma4_compat.InputError):
        call(processor(family, Inherits()), twice, sampling_rate=32000)

    class Own(type(made)):
        def __call__(self, *args, audio, sampling_rate, **kwargs):
            audio = [sound[::2] for sound in audio]
            return super().__call__(*args, audio=audio, sampling_rate=sampling_rate, **kwargs)

    own = processor(family)
    own.__class__ = Own
    assert_features(call(own, twice, sampling_rate=32000), references(family, sounds))


@families
def test_copies(family):
    extractor = extractor_class(family)(padding_side="left")
    sounds = waves(*LENGTHS)
    for copied in (pickle.loads(pickle.dumps(extractor)), copy.deepcopy(extractor)):
        assert vars(copied).keys() == vars(extractor).keys()
        assert_features(copied(sounds, return_tensors="np"), references(family, sounds))


def test_other_models():
    """Whisper's extractor pads where it is told to, and its processor merges as before."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor
    from transformers.processing_utils import ProcessingKwargs

    extractor = WhisperFeatureExtractor(padding_side="left")
    made = WhisperProcessor(extractor, tokenizer())
    frames = [np.ones((length, extractor.feature_size)) for length in (16, 32)]
    given = {"max_length": 512, "padding": "max_length", "sampling_rate": 48000}

    def outputs():
        padded = extractor.pad({"input_features": frames}, return_tensors="np")
        return made._merge_kwargs(ProcessingKwargs, **given), padded["input_features"]

    merged, padded = outputs()
    with gemma4_compat.disabled("sound_arguments"):
        expected, without = outputs()
    assert merged == expected
    assert merged["audio_kwargs"] == given
    np.testing.assert_array_equal(padded, without)
    assert not padded[0][:16].any(), "it is padded on the left"


@families
def test_switched_off(family):
    """Without the patch, the same object gives what it gave."""
    extractor = extractor_class(family)(padding_side="left")
    sounds = waves(*LENGTHS)
    with gemma4_compat.disabled("sound_arguments"):
        without = extractor(sounds, return_tensors="np")
    with pytest.raises(AssertionError, match="the features of a sound differ"):
        assert_features(without, references(family, sounds))
    assert_features(extractor(sounds, return_tensors="np"), references(family, sounds))
