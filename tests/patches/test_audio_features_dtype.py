"""Sound in QLoRA under autocast.  ``test_audio_float16`` runs all families and dtypes."""

from __future__ import annotations

import pytest
import torch

import gemma4_compat
from gemma4_compat.tiny import TOWERS, audio_inputs, image_inputs
from tests.patches.test_audio_float16 import SCATTER, SLACK, autocast
from tests.support import assert_same, dequantized, load_model, logits, split

IN_FLOAT = [*TOWERS, "model.embed_vision", "model.embed_audio", "lm_head"]
SHOWS = pytest.mark.regression("audio_features_dtype", SCATTER)


def both(config):
    """A batch of an image and a sound in one row."""
    image, sound = image_inputs(config), audio_inputs(config)
    return image | {
        name: torch.cat([image[name], each], dim=1) if name in image else each
        for name, each in sound.items()
    }


@SHOWS
@pytest.mark.parametrize(
    ("targets", "inputs_of"),
    [(r".*language_model.*\.q_proj", audio_inputs), (r".*audio_tower.*\.linear", both)],
)
def test_qlora_has_the_loss_of_float32(model_dir, targets, inputs_of):
    """As near as the model that is wholly in bfloat16, whose rounding autocast has as well."""
    peft = pytest.importorskip("peft")

    def load():
        return load_model(model_dir, "nf4", llm_int8_skip_modules=IN_FLOAT)

    def loss(model, dtype=None):
        inputs = inputs_of(model.config)
        with autocast(dtype):
            return model(**inputs, labels=inputs["input_ids"]).loss

    with torch.no_grad():
        expected = loss(torch.nn.Module.float(dequantized(load())))
        off = (loss(dequantized(load())).float() - expected).abs()
    model = peft.prepare_model_for_kbit_training(
        load(), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets)).train()
    found = loss(model, torch.bfloat16)
    found.backward()
    assert (found.float() - expected).abs() <= max(SLACK * off, 2**-8 * expected)
    grads = [p.grad for n, p in model.named_parameters() if "lora_B" in n]
    assert all(grad.isfinite().all() for grad in grads)
    assert sum(bool(grad.any()) for grad in grads) > len(grads) // 2


@SHOWS
def test_only_the_merge_is_cast(model_dir):
    """Features that users ask for keep their dtype; without autocast nothing changes."""
    model = load_model(model_dir).float()
    inputs = audio_inputs(model.config)
    sounds = (inputs["input_features"], inputs["input_features_mask"])
    with torch.no_grad(), autocast(torch.bfloat16):
        features = model.model.get_audio_features(*sounds, return_dict=True).pooler_output
        states = model.model(**inputs).last_hidden_state
    assert features.dtype == torch.bfloat16
    assert states.isfinite().all()
    plain = logits(model)
    with gemma4_compat.disabled("audio_features_dtype"):
        assert_same(logits(model), plain)


@SHOWS
def test_offloaded_subclass_with_embeddings_of_its_own(model_dir, tmp_path):
    """The towers on the disk; a user's embedding function; given ``inputs_embeds``."""
    model = load_model(model_dir).float()
    called = []

    class Own(type(model.model)):
        def get_audio_features(self, *args, **kwargs):
            called.append("features")
            return super().get_audio_features(*args, **kwargs)

        def get_input_embeddings(self):
            called.append("embeddings")
            return super().get_input_embeddings()

    model.model.__class__ = Own
    with autocast(torch.bfloat16):
        expected = logits(model, ["audio"])
        assert set(called) == {"features", "embeddings"}
        assert_same(logits(split(model, tmp_path), ["audio"]), expected)
