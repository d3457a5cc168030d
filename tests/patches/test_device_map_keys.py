"""A warning names the keys of a device map that match no module of the model."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import gemma4_compat
from gemma4_compat.tiny import TOWERS
from tests.support import assert_same, load_model, logits

OURS = "gemma4_compat.patches.offloading.device_map_keys"
PROJECTOR = "model.multi_modal_projector"
#: a map for Gemma 3 on one device; transformers does not pass it to accelerate
PARTS = {**dict.fromkeys(("model.language_model", *TOWERS, PROJECTOR, "lm_head"), "cpu")}


@pytest.fixture
def listen(caplog):
    """Run a function; return its result, all messages of the call, and those of the patch."""

    def run(function, *args, **kwargs):
        caplog.clear()
        loggers = [logging.getLogger(name) for name in ("transformers", "accelerate")]
        for logger in loggers:
            logger.addHandler(caplog.handler)
        try:
            with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO"):
                warnings.simplefilter("always")
                result = function(*args, **kwargs)
        finally:
            for logger in loggers:
                logger.removeHandler(caplog.handler)
        ours = [record.getMessage() for record in caplog.records if record.name == OURS]
        said = [*(record.getMessage() for record in caplog.records), *map(str, caught)]
        return result, said, ours

    return run


@pytest.mark.regression("device_map_keys", r"no warning names model\.multi_modal_projector")
def test_unknown_key_is_told(model_dir, listen):
    model, said, _ = listen(load_model, model_dir, device_map=PARTS)
    told = [message for message in said if PROJECTOR in message]
    assert told, f"no warning names {PROJECTOR}"
    assert len(told) == 1
    assert "Gemma4ForConditionalGeneration" in told[0]
    assert f"{PROJECTOR} (closest: model.embed_vision)" in told[0]
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_the_map_is_used_as_it_is(model_dir, listen, tmp_path):
    """With two devices accelerate warns, too.  Our warning is logged once and changes nothing."""
    device_map = {"": "cpu", PROJECTOR: "disk"}

    def load():
        return load_model(model_dir, device_map=dict(device_map), offload_folder=str(tmp_path))

    with gemma4_compat.disabled("device_map_keys"):
        expected, said, ours = listen(load)
    assert not ours
    model, said_now, ours = listen(load)
    assert len(ours) == 1
    assert len(said_now) == len(said) + 1
    assert model.hf_device_map == expected.hf_device_map == device_map
    places = {name: p.device for name, p in model.named_parameters()}
    assert places == {name: p.device for name, p in expected.named_parameters()}
    assert_same(logits(model, ["text", "image"]), logits(expected, ["text", "image"]))


def test_closest_names(model_dir, listen):
    expected = {
        "multi_modal_projector.linear": None,
        "vision_tower": "model.vision_tower",
        "model.vison_tower": "model.vision_tower",
        "model.vision_tower.vision_model.encoder.layers.1": "model.vision_tower.encoder.layers.1",
        "model.audio_model": "model.audio_tower",
        "model.layers.3": "model.language_model.layers.3",
        "language_model.model.layers.2": "model.language_model.layers.2",
        "language_model.lm_head": "lm_head",
        "model.embed_tokens": "model.language_model.embed_tokens",
        "model.language_model.model.norm": "model.language_model.norm",
        "base_model.model.model.audio_tower": "model.audio_tower",
        "transformer.h.0": None,
        "model.language_model.layers.77.mlp.up_proj": "any layer",
    }
    device_map = dict.fromkeys(["", *expected], "cpu")
    _, _, (message,) = listen(load_model, model_dir, device_map=device_map)
    for key, name in expected.items():
        if name is None:
            assert f"{key}, " in message
        elif name == "any layer":
            assert f"{key} (closest: model.language_model.layers." in message
        else:
            assert f"{key} (closest: {name})" in message
    parts = message.partition("The model has: ")[2].partition(".  ")[0].split(", ")
    for part in ("model.language_model", "model.embed_vision", "model.embed_audio", "lm_head"):
        assert part in parts
    assert "" not in parts


def test_known_keys(model_dir, listen):
    """A key may name any parameter, buffer or module, including tied and shared ones."""
    model = load_model(model_dir)
    names = {"": "cpu"}
    for named in (model.named_modules, model.named_parameters, model.named_buffers):
        names.update((name, "cpu") for name, _ in named(remove_duplicate=False))
    assert {"lm_head", "lm_head.weight"} < names.keys()
    _, _, ours = listen(load_model, model_dir, device_map=names)
    assert ours == []


@pytest.mark.parametrize("device_map", ["auto", "cpu", torch.device("cpu"), {"": "cpu"}])
def test_maps_without_names(model_dir, device_map, listen):
    _, _, ours = listen(load_model, model_dir, device_map=device_map)
    assert ours == []


def test_part_that_this_checkpoint_goes_without(model_dir, tmp_path, listen):
    """31B and 26B-A4B have no audio tower, but a map for all sizes may name it."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    config = Gemma4Config.from_pretrained(model_dir)
    config.audio_config = None
    Gemma4ForConditionalGeneration(config).save_pretrained(tmp_path)
    device_map = {"model.audio_tower": "cpu", "model.embed_audio": "cpu", "": "cpu"}
    model, _, ours = listen(load_model, tmp_path, device_map=device_map)
    assert model.model.audio_tower is None
    assert ours == []


def test_text_model_alone(model_dir, listen):
    """The text model is loaded with the map of the whole model."""
    from transformers import Gemma4ForCausalLM

    def load():
        return Gemma4ForCausalLM.from_pretrained(model_dir, device_map=PARTS)

    _, _, (message,) = listen(load)
    assert "Gemma4ForCausalLM" in message
    assert "closest: model.embed_tokens" not in message
    assert "model.layers" in message.partition("The model has: ")[2]


def test_other_models(tmp_path, listen):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    _, _, ours = listen(LlamaForCausalLM.from_pretrained, tmp_path, device_map={**PARTS})
    assert ours == []


def test_uncovered_parameters_are_accelerates_own_error(model_dir, tmp_path, caplog):
    device_map = {"model.language_model": "cpu", "model.vision_tower": "disk", PROJECTOR: "cpu"}
    with (
        caplog.at_level("WARNING", logger=OURS),
        pytest.raises(ValueError, match="does not give any device for the following parameters"),
    ):
        load_model(model_dir, device_map=device_map, offload_folder=str(tmp_path))
    assert len([record for record in caplog.records if record.name == OURS]) == 1


def test_adapter_on_a_model_with_such_a_map(model_dir, language_adapter_dir, listen, tmp_path):
    """transformers' load_adapter reads the base model's map again; the warning is not repeated."""
    device_map = {"": "cpu", PROJECTOR: "disk"}
    model = load_model(model_dir, device_map=device_map, offload_folder=str(tmp_path))
    assert PROJECTOR in model.hf_device_map
    _, _, ours = listen(model.load_adapter, str(language_adapter_dir))
    assert ours == []


def test_quantized(model_dir, listen):
    model, _, (message,) = listen(load_model, model_dir, "nf4", device_map=PARTS)
    assert f"{PROJECTOR} (closest: model.embed_vision)" in message
    assert model.is_loaded_in_4bit


@pytest.mark.cuda
def test_what_the_key_was_meant_for_is_on_the_cpu(model_dir, listen):
    device_map = dict.fromkeys(PARTS, 0)
    model, _, ours = listen(load_model, model_dir, device_map=device_map)
    assert model.model.embed_vision.embedding_projection.weight.device.type == "cpu"
    assert len(ours) == 1
    model, _, ours = listen(
        load_model,
        model_dir,
        device_map=dict.fromkeys([*PARTS, "model.embed_vision", "model.embed_audio"], 0),
    )
    assert {p.device.type for p in model.parameters()} == {"cuda"}
