"""Items of a sound column of ``datasets`` have the features of their samples.

The reference is the feature extractor, called on the samples of each sound alone.  ``Decoder`` has
the methods of ``AudioDecoder`` that ``datasets`` documents: torchcodec's own needs FFmpeg.
"""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gemma4_compat
from tests.sound import FAMILIES, alone, assert_features, extractor_class, processor, waves

families = pytest.mark.parametrize("family", FAMILIES)
LENGTHS = (16001, 48123)
REFUSED = (
    "ufunc|array element with a sequence|only a single or a list of entries|Incorrect format used|"
    "Invalid input type|could not be broadcast|unfold implementation|cannot reshape|"
    "input_features"
)


class Decoder:
    """What ``datasets`` 4 gives for an item."""

    def __init__(self, channels, sampling_rate):
        self.channels, self.sampling_rate = torch.as_tensor(channels), sampling_rate

    def get_all_samples(self):
        return SimpleNamespace(data=self.channels, sample_rate=self.sampling_rate)

    def __getitem__(self, name):
        if name == "array":
            return self.channels.numpy().mean(axis=0)
        return {"sampling_rate": self.sampling_rate}[name]


def dictionary(sound, rate=16000):
    return {"path": "a.wav", "array": sound, "sampling_rate": rate}


def decoder(sound, rate=16000):
    return Decoder(np.atleast_2d(sound), rate)


def call(made, audio, count):
    """The processor's features of ``count`` sounds."""
    text = ["a <|audio|>"] * count
    return made(text=text, audio=audio, return_tensors="np", padding=True)


def chat(made, audio):
    part = [{"type": "audio", "audio": audio}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": part}]
    before = copy.copy(part)
    found = made.apply_chat_template(messages, tokenize=True, return_dict=True)
    assert all(a is b for a, b in zip(part, before, strict=True)), "the user's messages stay"
    return found


def covered(family):
    """A processor that reads its sound in ``ProcessorMixin.__call__``."""
    from transformers.processing_utils import ProcessorMixin

    made = processor(family)
    own = next(cls for cls in type(made).__mro__ if "__call__" in vars(cls))
    calls_super = "super" in inspect.unwrap(own.__call__).__code__.co_names
    if own is not ProcessorMixin and not calls_super:
        pytest.skip("the processor of this release reads its sound in a __call__ of its own")
    return made


@pytest.mark.regression("sound_columns", REFUSED)
@families
@pytest.mark.parametrize("item", [dictionary, decoder])
def test_chat(item, family):
    """On every release."""
    [sound] = waves(LENGTHS[0])
    assert_features(chat(processor(family), item(sound)), [alone(family, sound)])


@pytest.mark.regression("sound_columns", REFUSED)
@families
@pytest.mark.parametrize("item", [dictionary, decoder])
def test_call(item, family):
    made = covered(family)
    sounds = waves(*LENGTHS)
    expected = [alone(family, sound) for sound in sounds]
    items = [item(sound) for sound in sounds]
    for audio in (items, tuple(items), [[each] for each in items]):
        assert_features(call(made, audio, 2), expected)
    assert_features(call(made, items[0], 1), expected[:1])


@pytest.mark.regression("sound_columns", REFUSED)
@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_tensors(family):
    made = covered(family)
    sounds = waves(*LENGTHS)
    found = call(made, [torch.tensor(sound) for sound in sounds], 2)
    assert_features(found, [alone(family, sound) for sound in sounds])


@pytest.mark.regression("sound_columns", REFUSED)
@families
def test_column_of_a_data_set(family):
    """A whole column, which ``datasets`` 4 reads when its items are needed."""
    datasets = pytest.importorskip("datasets", reason="the columns are of datasets")
    made = covered(family)
    sounds = waves(*LENGTHS)
    rows = datasets.Dataset.from_dict({"audio": [dictionary(sound) for sound in sounds]})
    expected = [alone(family, sound) for sound in sounds]
    for given in (rows["audio"], rows[:]["audio"], rows.with_format("numpy")[:]["audio"]):
        assert_features(call(made, given, 2), expected)


@families
@pytest.mark.parametrize("item", [dictionary, decoder])
def test_another_rate(item, family):
    [sound] = waves(48000)
    refused = pytest.raises(gemma4_compat.InputError, match=r"48000 .* wants 16000.*cast_column")
    with refused:
        chat(processor(family), item(sound, 48000))
    made = covered(family)
    with refused:
        call(made, [item(sound, 48000)], 1)


@pytest.mark.regression("sound_columns", REFUSED)
@families
@pytest.mark.parametrize("shape", [(2, 16000), (16000, 2)])
def test_several_channels(shape, family):
    made = covered(family)
    sound = np.zeros(shape, "float32")
    for audio in (sound, [sound], [dictionary(sound)], [decoder(sound)], torch.zeros(shape)):
        with pytest.raises(gemma4_compat.InputError, match=r"several channels.*mean"):
            call(made, audio, 1)


@families
def test_integers_and_one_channel(family):
    """An item in int16 would be heard 32768 times too loud; a channel may come first or last."""
    made = covered(family)
    (sound,) = waves(LENGTHS[0])
    expected = [alone(family, sound)]
    for one in (sound[None], sound[:, None]):
        assert_features(call(made, [dictionary(one)], 1), expected)
    with pytest.raises(gemma4_compat.InputError, match=r"int16.* divide it by 32768"):
        call(made, [dictionary((sound * 1000).astype("int16"))], 1)


@families
def test_what_was_taken_before(family):
    """Arrays and lists go to the original as they are; one channel is a sound."""
    made = covered(family)
    sounds = waves(*LENGTHS)
    expected = [alone(family, sound) for sound in sounds]
    for audio in (sounds, tuple(sounds), [sound.tolist() for sound in sounds]):
        found = call(made, audio, 2)
        assert_features(found, expected)
        with gemma4_compat.disabled("sound_columns"):
            before = call(made, audio, 2)
        assert found.keys() == before.keys()
        for name in found:
            np.testing.assert_array_equal(found[name], before[name])
    assert_features(call(made, [sound[None] for sound in sounds], 2), expected)


@families
def test_extractor_of_a_user(family):
    """An extractor that reads sound with code of its own gets what it was passed."""
    seen = []

    class Mixes(extractor_class(family)):
        def __call__(self, sounds, **kwargs):
            seen.extend(sounds)
            kwargs.pop("sampling_rate", None)
            return super().__call__([sound.mean(axis=0) for sound in sounds], **kwargs)

    covered(family)
    sound = np.stack(waves(16001, 16001))
    found = call(processor(family, Mixes()), [sound], 1)
    assert seen[0] is sound
    assert_features(found, [alone(family, sound.mean(axis=0))])


def test_other_models():
    """Whisper's processor passes on what it gets."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor
    from transformers.processing_utils import ProcessorMixin

    from tests.sound import tokenizer

    made = WhisperProcessor(WhisperFeatureExtractor(), tokenizer())
    item = dictionary(waves(16000)[0], 48000)
    with pytest.raises((TypeError, ValueError)) as raised:
        ProcessorMixin.__call__(made, audio=item, text="a")
    assert not isinstance(raised.value, gemma4_compat.InputError)
