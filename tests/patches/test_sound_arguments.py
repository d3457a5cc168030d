"""Arguments for the text leave the features of sound as they were, or as they are by default.

The reference is the feature extractor, called on each sound alone.  Gemma 3n's marks up to three
frames of padding as sound, so only the frames that a sound has alone are compared.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from importlib.metadata import version

import numpy as np
import pytest
from packaging.version import Version

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
#: seconds of a sound that is longer than the 30 that the extractors of Gemma 4 and 3n leave of it
LONG = 33
#: What an argument for the text does to sound without the patch: the frames of each sound of
#: ``LENGTHS`` and of one of ``LONG`` seconds, or the error.  The same on transformers 5.6.2, 5.15.1
#: and 5.24.0.  A sound that gets fewer frames than by default is cut, which is wrong, as is an
#: error; all else is right, and stays as it is.
WITHOUT = (
    # argument, Gemma 3n, Gemma 4, Gemma 4 unified
    ({}, (298, 298, 2997), (300, 300, 2999), (76, 76, 825)),
    ({"truncation": False}, (298, 298, 3297), (300, 300, 3299), (76, 76, 825)),
    ({"truncation": True}, (298, 298, 2997), (300, 300, 2999), (76, 76, 825)),
    ({"truncation": True, "max_length": 1024}, (4, 4, 4), (6, 6, 6), (76, 76, 825)),
    (
        {"truncation": False, "max_length": 1024},
        (298, 298, 3297), (300, 300, 3299), (76, 76, 825),
    ),
    ({"max_length": 20}, (0, 0, 0), (0, 0, 0), (20, 20, 20)),
    ({"max_length": 100_000}, (298, 298, 623), (300, 300, 625), (76, 76, 825)),
    ({"max_length": 500_000}, (298, 298, 3123), (300, 300, 3125), (76, 76, 825)),
    ({"max_length": 600_000}, (298, 298, 3297), (300, 300, 3299), (76, 76, 825)),
    ({"max_length": None}, ValueError, ValueError, (76, 76, 825)),
    ({"padding": False}, (97, 298, 2997), (100, 300, 2999), ValueError),
    ({"padding": "longest"}, (298, 298, 2997), (300, 300, 2999), (76, 76, 825)),
    ({"padding": "max_length"}, (2997, 2997, 2997), (2999, 2999, 2999), ValueError),
    ({"padding": "max_length", "max_length": 20}, (0, 0, 0), (0, 0, 0), (20, 20, 20)),
    (
        {"padding": "max_length", "max_length": 1000},
        (4, 4, 4), (6, 6, 6), (1000, 1000, 1000),
    ),
    (
        {"padding": "max_length", "max_length": 60_000},
        (372, 372, 372), (375, 375, 375), (60_000, 60_000, 60_000),
    ),
    ({"pad_to_multiple_of": 8}, (298, 298, 2997), (300, 300, 2999), (76, 76, 825)),
    ({"pad_to_multiple_of": 1000}, (304, 304, 2997), (306, 306, 2999), (76, 76, 825)),
    ({"pad_to_multiple_of": None}, (298, 298, 2997), (300, 300, 2999), (76, 76, 825)),
    ({"return_attention_mask": False}, AttributeError, AttributeError, (76, 76, 825)),
    ({"return_attention_mask": True}, (298, 298, 2997), (300, 300, 2999), (76, 76, 825)),
    ({"return_attention_mask": None}, (298, 298, 2997), (300, 300, 2999), (76, 76, 825)),
)  # fmt: skip


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


def outcome(made, sounds, given):
    """What the processor returns, or its error."""
    try:
        return call(made, sounds, **{"return_tensors": None, **given})
    except (AttributeError, ValueError) as error:
        return error


def kept(outputs):
    """How many frames of each sound are no padding."""
    return [int(np.sum(mask)) for mask in outputs["input_features_mask"]]


def is_cut(outputs, default):
    """Gemma 3n's extractor marks up to four frames of padding as sound."""
    return any(few < most - 4 for few, most in zip(kept(outputs), kept(default), strict=True))


@families
def test_only_what_was_wrong_changes(family):
    made, batches = processor(family), (waves(*LENGTHS), waves(LONG * 16000))
    with gemma4_compat.disabled("sound_arguments"):
        without = [[outcome(made, sounds, row[0]) for sounds in batches] for row in WITHOUT]
    column = 1 + list(FAMILIES).index(family)
    for row, each in zip(WITHOUT, without, strict=True):
        given, expected = row[0], row[column]
        if isinstance(expected, type):
            assert isinstance(each[0], expected), given
        else:
            frames = [len(features) for part in each for features in part["input_features"]]
            assert frames == [*expected], given
        for sounds, before, default in zip(batches, each, without[0], strict=True):
            found = outcome(made, sounds, given)
            if isinstance(before, Exception) or is_cut(before, default):
                assert_features(found, references(family, sounds))
                assert kept(found) == kept(default), given
            else:
                assert found.keys() == before.keys()
                for name in before:
                    pairs = zip(found[name], before[name], strict=True)
                    assert all(np.array_equal(*pair) for pair in pairs), (given, name)


@families
@pytest.mark.parametrize("given", [{"truncation": False}, {"max_length": 600_000}], ids=str)
def test_a_long_sound_is_heard_whole(family, given):
    """The placeholders of Gemma 4 are as many since transformers 5.10; before, its model raises."""
    made, [sound] = processor(family), waves(LONG * 16000)
    found = call(made, [sound], **given)
    whole = extractor_class(family)()([sound], return_tensors="np", truncation=False)
    assert_features(found, whole["input_features"])
    tokens = int(np.sum(found["input_ids"] == made.audio_token_id))
    capped = family == "gemma4" and Version(version("transformers")) < Version("5.10")
    assert (
        tokens == {"gemma3n": 188, "gemma4": 750 if capped else 825, "gemma4_unified": 825}[family]
    )


@families
def test_what_an_extractor_leaves_of_a_sound(family):
    """The number that the patch has is the default of the installed release."""
    from gemma4_compat.patches.images_and_sound.sound_arguments import _longest

    extractor = extractor_class(family)
    default = inspect.signature(extractor.__call__).parameters["max_length"].default
    assert _longest(extractor()) == default


@families
def test_a_length_for_both(family):
    """Padding for the text pads a sound to a length that ``audio_kwargs`` have."""
    made, sounds = processor(family), waves(*LENGTHS)
    given = {"padding": "max_length", "audio_kwargs": {"max_length": 80_000}}
    if family == "gemma4_unified":
        given["audio_kwargs"] = {"max_length": 80}
    found = call(made, sounds, **given)
    with gemma4_compat.disabled("sound_arguments"):
        without = call(made, sounds, **given)
    np.testing.assert_array_equal(found["input_features"], without["input_features"])


@families
def test_defaults_of_a_processor(family):
    """Newer releases (5.23, not 5.21) read default arguments for sound from the processor."""
    made, sounds = processor(family), waves(*LENGTHS)
    unit = 1 if family == "gemma4_unified" else 640
    made.audio_kwargs = {"max_length": 10 * unit, "truncation": True}
    with gemma4_compat.disabled("sound_arguments"):
        before = call(made, sounds)["input_features"]
    np.testing.assert_array_equal(call(made, sounds)["input_features"], before)
    if before.shape[1] <= 10:
        assert_features(call(made, sounds, max_length=20), references(family, sounds))


def test_every_argument_is_in_these_tables():
    """A release with more arguments needs a decision for each."""
    from transformers.processing_utils import AudioKwargs, TextKwargs

    sound, text = set(AudioKwargs.__annotations__), set(TextKwargs.__annotations__)
    assert sound & text - {"return_tensors"} == set(SHARED)
    assert {name for row in WITHOUT for name in row[0]} == set(SHARED)
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
def test_rates_that_nothing_reads(family):
    """Without a sound, and of a type that is no number, a rate does what it does without us."""
    made, [sound] = processor(family), waves(LENGTHS[0])
    assert made(text=["a b"], sampling_rate=48000)["input_ids"]
    for rate in ([16000], "16000", None, np.int64(16000), 16000.0):
        with gemma4_compat.disabled("sound_arguments"):
            before = outcome(made, [sound], {"sampling_rate": rate})
        found = outcome(made, [sound], {"sampling_rate": rate})
        assert type(found) is type(before)
        if not isinstance(before, Exception):
            assert_features(found, references(family, [sound]))


@pytest.mark.regression("sound_arguments", "DID NOT RAISE")
@families
def test_rate_of_an_extractor(family):
    """As Whisper's, which raises in its own ``__call__``."""
    extractor, [sound] = extractor_class(family)(), waves(44100)
    message = r"44100 samples a second.* wants 16000.* 2.76 times.*librosa.resample"
    for rate in (44100, 44100.0, np.int32(44100)):
        with pytest.raises(gemma4_compat.InputError, match=message):
            extractor([sound], sampling_rate=rate)
    for rate in (16000, 16000.0, None, [16000], "16000"):
        assert_features(extractor([sound], sampling_rate=rate), references(family, [sound]))


class Decoder:
    """An item as ``datasets`` 4 has it."""

    def get_all_samples(self):
        raise AssertionError("the samples are not asked for")


@pytest.mark.regression("sound_arguments", r"broadcast|len\(\) of unsized")
@families
def test_items_for_an_extractor(family):
    """A processor takes them; an extractor says what it wants."""
    extractor, [sound] = extractor_class(family)(), waves(LENGTHS[0])
    item = {"path": "a.wav", "array": sound, "sampling_rate": 16000}
    for given in (item, [item], (item, item), Decoder(), [Decoder()], np.array([item])):
        with pytest.raises(gemma4_compat.InputError, match=r"sound column.* item\['array'\]"):
            extractor(given)
    found = extractor([item["array"]], sampling_rate=item["sampling_rate"])
    assert_features(found, references(family, [sound]))
    for given in ([], np.zeros(0, "float32"), sound, sound.tolist(), sound[None]):

        def tried(given=given):
            try:
                return extractor(given, return_tensors="np")["input_features"]
            except (IndexError, TypeError, ValueError) as error:
                return type(error)

        with gemma4_compat.disabled("sound_arguments"):
            before = tried()
        assert np.array_equal(tried(), before), "what is no item is read as without the patch"


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

    class PassesOn(extractor_class(family)):
        def __call__(self, sounds, sampling_rate, **kwargs):
            return super().__call__(
                [sound[::2] for sound in sounds], sampling_rate=sampling_rate, **kwargs
            )

    found = call(processor(family, PassesOn()), twice, sampling_rate=32000)
    assert_features(found, references(family, sounds))

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
