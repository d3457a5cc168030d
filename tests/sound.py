"""Processors of sound and text, with a small tokenizer; they need no library of images."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from gemma4_compat.tiny import _config

FAMILIES = {"gemma3n": "Gemma3n", "gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ 'a <|audio|> ' if part['type'] == 'audio' else part['text'] }}{% endfor %}{% endfor %}"
)
_TOKENS = {
    "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
    "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip


def waves(*lengths):
    """Noise of these numbers of samples."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(length).astype("float32") for length in lengths]


def tokenizer(own=()):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    words = [*named.values(), *(own or ["a", "b", *_TOKENS.values()])]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    rust = Tokenizer(model)
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=rust, extra_special_tokens=_TOKENS, **named)


def extractor_class(family):
    import transformers.processing_utils  # noqa: F401  the patches wait for it

    module = f"transformers.models.{family}"
    pytest.importorskip(module)
    features = import_module(f"{module}.feature_extraction_{family}")
    return getattr(features, f"{FAMILIES[family]}AudioFeatureExtractor")


def processor_class(family):
    """The family's processor, without the parts for images and videos."""
    from transformers.processing_utils import ProcessorMixin

    pytest.importorskip(f"transformers.models.{family}")
    try:
        module = import_module(f"transformers.models.{family}.processing_{family}")
    except (ModuleNotFoundError, NameError) as error:  # these releases import them for images
        pytest.skip(f"the processor needs Pillow, and perhaps torchvision, here: {error}")
    whole = getattr(module, f"{FAMILIES[family]}Processor")

    class WithoutImages(ProcessorMixin):
        def __init__(self, **parts):
            super().__init__(**{name: part for name, part in parts.items() if part is not None})

    class Sound(whole, WithoutImages):
        def __init__(self, feature_extractor, tokenizer, **kwargs):
            kwargs["image_processor"] = None
            if family != "gemma3n":
                kwargs["video_processor"] = None
            super().__init__(feature_extractor=feature_extractor, tokenizer=tokenizer, **kwargs)

        @classmethod
        def get_attributes(cls):
            return ["feature_extractor", "tokenizer"]

    return Sound


def processor(family, extractor=None, words=None):
    made = processor_class(family)(extractor or extractor_class(family)(), words or tokenizer())
    made.chat_template = TEMPLATE
    return made


def tiny_tokenizer():
    """The tokens of the tiny Gemma 4: w4 to w499, and those for images and sound."""
    config = _config()
    ids = {"<|video|>": config.video_token_id, "<|image|>": config.image_token_id}
    ids |= {"<|image>": config.boi_token_id, "<image|>": config.eoi_token_id}
    ids |= {"<|audio|>": config.audio_token_id, "<|audio>": config.boa_token_id}
    ids |= {"<audio|>": config.eoa_token_index}
    words = [f"w{i}" for i in range(4, min(ids.values()))]
    words = tokenizer([*words, *sorted(ids, key=ids.get), "<turn|>"])
    assert words.convert_tokens_to_ids([*ids]) == [*ids.values()]
    return words


def tiny_processor(padding_side):
    """The processor of the tiny Gemma 4: its tokens, and features of 32 mel bins."""
    words = tiny_tokenizer()
    words.padding_side = padding_side
    mel_bins = _config().audio_config.subsampling_conv_channels[0]
    return processor("gemma4", extractor_class("gemma4")(feature_size=mel_bins), words)


def alone(family, sound):
    """The features of one sound, alone: a reference that no padding of a batch touches."""
    return extractor_class(family)()([sound], return_tensors="np")["input_features"][0]


def assert_features(outputs, references):
    """Each sound of a batch has the features that it has alone, bit for bit."""
    for found, expected in zip(outputs["input_features"], references, strict=True):
        found = np.asarray(found)[: len(expected)]
        assert found.shape == expected.shape, f"sound is cut to {len(found)} frames"
        worst = np.abs(found - expected).max()
        assert worst == 0, f"the features of a sound differ by {worst:.3g}"
