"""Adapters of the text model can be loaded on the multimodal model, and vice versa."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import gemma4_compat
from tests.support import INPUTS, assert_same, load_model, logits, split

peft = pytest.importorskip("peft")

OURS = "gemma4_compat.patches.adapters.text_model_adapter"
NOT_LOADED = "tensors of the adapter were not loaded"
WEIGHTS = "adapter_model.safetensors"
#: LAYER matches the decoder layers of both models; TARGETS adds layers of the vision tower.
LAYER = r"(?:.*\.)?(?:model|language_model)\.layers\.\d+\."
TARGETS = rf"{LAYER}(?:self_attn|mlp)\.(?:q|v|down)_proj|.*\.vision_tower\..*\.q_proj\.linear"


@pytest.fixture(scope="module")
def text_dir(model_dir, tmp_path_factory):
    """A checkpoint of the text model alone, with the same weights."""
    from transformers import Gemma4ForCausalLM

    folder = tmp_path_factory.mktemp("text")
    whole = load_model(model_dir)
    weights = {
        name.replace("model.language_model.", "model."): value
        for name, value in whole.state_dict().items()
        if name.startswith("model.language_model.")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = whole.config.text_config
    config.architectures = [Gemma4ForCausalLM.__name__]
    config.save_pretrained(folder)
    return folder


def load_base(folder):
    import transformers

    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    name = "Gemma4ForCausalLM" if "text" in model_type else "Gemma4ForConditionalGeneration"
    model, told = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": "cpu"}, output_loading_info=True
    )
    assert not told["missing_keys"]
    return model.eval()


def make(base, to, **config):
    """Save an adapter; its values depend on the part of the names that both models share."""
    config.setdefault("target_modules", TARGETS)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                seed = re.sub(r".*(language_model|model)\.", "", name)
                generator = torch.Generator().manual_seed(sum(map(ord, seed)))
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(to)
    return model.eval()


@pytest.fixture(scope="module")
def text_adapter(text_dir, tmp_path_factory):
    """The folder of an adapter made on the text model, and its logits there."""
    folder = tmp_path_factory.mktemp("text_adapter")
    return folder, text_logits(make(load_base(text_dir), folder))


@pytest.fixture(scope="module")
def whole_adapter(model_dir, tmp_path_factory):
    """The folder of an adapter made on the multimodal model, and its logits for text."""
    folder = tmp_path_factory.mktemp("whole_adapter")
    return folder, text_logits(make(load_base(model_dir), folder))


def text_logits(model):
    from transformers import Gemma4Config

    config = Gemma4Config(text_config=model.config.get_text_config().to_dict())
    with torch.no_grad():
        return {"text": model(input_ids=INPUTS["text"](config)["input_ids"]).logits.float()}


def loaded(model, folder, among="", adapter="default"):
    """Assert that the adapter has the values of the file, for names that contain ``among``."""
    values = {
        re.sub(r".*(language_model|model)\.layers", "layers", name): value
        for name, value in load_file(folder / WEIGHTS).items()
        if among in name
    }
    have = {
        re.sub(r".*(language_model|model)\.layers", "layers", name).replace(
            f".{adapter}", ""
        ): value
        for name, value in model.named_parameters()
        if "lora_" in name and f".{adapter}" in name
    }
    # Some ways to load create the adapter in the base model's dtype, and cast the values.
    missing = [
        name
        for name, value in values.items()
        if name not in have
        or not any(torch.equal(have[name].float(), v.float()) for v in (value, value.bfloat16()))
    ]
    assert not missing, f"{len(missing)} {NOT_LOADED}"


def attach(base, folder, how):
    if how == "peft":
        return peft.PeftModel.from_pretrained(base, folder)
    if how == "second":
        model = peft.get_peft_model(
            base, peft.LoraConfig(r=2, target_modules=rf"{LAYER}self_attn\.o_proj"), "other"
        )
        model.load_adapter(folder, "default")
        model.set_adapter("default")
        return model.eval()
    if how == "functions":
        peft.inject_adapter_in_model(peft.PeftConfig.from_pretrained(folder), base)
        state = load_file(folder / WEIGHTS)
        state = {name.removeprefix("base_model.model."): value for name, value in state.items()}
        peft.set_peft_model_state_dict(base, state)
        return base
    base.load_adapter(str(folder))
    return base


WAYS = ["peft", "second", "functions", "native"]


@pytest.mark.regression("text_model_adapter", NOT_LOADED)
@pytest.mark.parametrize("how", WAYS)
def test_text_adapter_on_the_multimodal_model(model_dir, text_dir, text_adapter, how, request):
    if how == "native":
        request.getfixturevalue("native_loading")
    folder, _ = text_adapter
    model = attach(load_base(model_dir), folder, how)
    loaded(model, folder)
    assert_same(text_logits(model), text_logits(attach(load_base(text_dir), folder, how)))


@pytest.mark.regression("text_model_adapter", NOT_LOADED)
@pytest.mark.parametrize("how", WAYS)
def test_multimodal_adapter_on_the_text_model(
    model_dir, text_dir, whole_adapter, how, request, caplog
):
    if how == "native":
        request.getfixturevalue("native_loading")
    folder, _ = whole_adapter
    with caplog.at_level(logging.WARNING, logger=OURS):
        model = attach(load_base(text_dir), folder, how)
    loaded(model, folder, among="language_model")
    assert_same(text_logits(model), text_logits(attach(load_base(model_dir), folder, how)))
    (message,) = [record.getMessage() for record in caplog.records if record.name == OURS]
    towers = [name for name in load_file(folder / WEIGHTS) if "language_model" not in name]
    assert towers
    assert f"{len(towers)} tensors of the adapter are for modules" in message
    assert "Gemma4ForCausalLM" in message


@pytest.mark.regression("text_model_adapter", NOT_LOADED)
@pytest.mark.parametrize("kind", [None, "nf4-nested"])
def test_split_base(model_dir, text_adapter, tmp_path, kind):
    folder, expected = text_adapter
    device_map = {"model.language_model.layers.1": "disk", "model.vision_tower": "disk", "": "cpu"}
    model = peft.PeftModel.from_pretrained(load_model(model_dir, kind), folder)
    loaded(model, folder)
    whole = logits(model, ["text", "image"])
    base = split(load_model(model_dir, kind), tmp_path, device_map)
    model = peft.PeftModel.from_pretrained(base, folder)
    loaded(model, folder)
    assert_same(logits(model, ["text", "image"]), whole)
    if kind is None:
        assert_same(text_logits(model), expected)


@pytest.mark.regression("text_model_adapter", NOT_LOADED)
def test_saved_again_under_the_names_of_its_model(model_dir, text_adapter, tmp_path):
    folder, expected = text_adapter
    model = peft.PeftModel.from_pretrained(load_base(model_dir), folder)
    loaded(model, folder)
    model.save_pretrained(tmp_path)
    language = [n for n in load_file(tmp_path / WEIGHTS) if ".language_model.layers." in n]
    assert len(language) == len(load_file(folder / WEIGHTS))
    with gemma4_compat.disabled("text_model_adapter"):
        again = peft.PeftModel.from_pretrained(load_base(model_dir), tmp_path)
    assert_same(text_logits(again), expected)


@pytest.mark.regression("text_model_adapter", NOT_LOADED)
def test_merged(model_dir, text_adapter, text_dir):
    """Merging computes the same in both models."""
    folder, _ = text_adapter
    model = peft.PeftModel.from_pretrained(load_base(model_dir), folder)
    loaded(model, folder)
    text = peft.PeftModel.from_pretrained(load_base(text_dir), folder).merge_and_unload()
    assert_same(text_logits(model.merge_and_unload()), text_logits(text))


@pytest.mark.regression("text_model_adapter", NOT_LOADED)
def test_images_are_as_without_the_adapter_of_the_towers(model_dir, text_adapter):
    """The file has no tensors for the towers' adapters, so these have no effect."""
    folder, _ = text_adapter
    model = peft.PeftModel.from_pretrained(load_base(model_dir), folder)
    loaded(model, folder)
    base = load_base(model_dir)
    inputs = INPUTS["image"](base.config)
    pixels = {
        "pixel_values": inputs["pixel_values"].bfloat16(),
        "pixel_position_ids": inputs["image_position_ids"],
    }
    with torch.no_grad():
        expected = base.model.vision_tower(**pixels).last_hidden_state
        found = model.get_base_model().model.vision_tower(**pixels).last_hidden_state
    assert torch.equal(found, expected)


def test_targets_that_are_names(model_dir, text_dir, tmp_path):
    """The names also match the clipped layers of the towers."""
    expected = text_logits(make(load_base(text_dir), tmp_path, target_modules=["q_proj", "v_proj"]))
    model = peft.PeftModel.from_pretrained(load_base(model_dir), tmp_path)
    loaded(model, tmp_path)
    assert_same(text_logits(model), expected)


def test_own_adapters_are_as_before(model_dir, text_dir, text_adapter, whole_adapter, caplog):
    for base, (folder, expected) in ((text_dir, text_adapter), (model_dir, whole_adapter)):
        with caplog.at_level(logging.WARNING, logger=OURS):
            model = peft.PeftModel.from_pretrained(load_base(base), folder)
        loaded(model, folder)
        assert_same(text_logits(model), expected)
    assert not [record for record in caplog.records if record.name == OURS]


def test_other_models(llama_dir, tmp_path):
    from transformers import LlamaForCausalLM

    model = make(LlamaForCausalLM.from_pretrained(llama_dir), tmp_path, target_modules=["q_proj"])
    again = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(llama_dir), tmp_path)
    state = peft.get_peft_model_state_dict(again)
    assert all(torch.equal(v, state[k]) for k, v in peft.get_peft_model_state_dict(model).items())


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_patterns_with_whole_names_are_refused(model_dir, text_dir, tmp_path, pattern):
    """If they were accepted, the scale of a layer would change without a message."""
    make(load_base(text_dir), tmp_path, **{pattern: {"model.layers.1.self_attn.q_proj": 2}})
    wanted = rf"its {pattern} names layers.*language_model\.layers\.1\.self_attn\.q_proj"
    with pytest.raises(ValueError, match=wanted):
        peft.PeftModel.from_pretrained(load_base(model_dir), tmp_path)


def test_patterns_that_fit_both(model_dir, text_dir, tmp_path):
    patterns = {
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2},
        "alpha_pattern": {"q_proj": 3},
    }
    expected = text_logits(make(load_base(text_dir), tmp_path, **patterns))
    model = peft.PeftModel.from_pretrained(load_base(model_dir), tmp_path)
    assert_same(text_logits(model), expected)


def test_targets_that_fit_in_part_are_refused(model_dir, text_dir, tmp_path):
    make(load_base(text_dir), tmp_path, target_modules=["v_proj", "model.layers.1.mlp.up_proj"])
    wanted = r"target_modules do not match model\.language_model\.layers\.1\.mlp\.up_proj,"
    with pytest.raises(ValueError, match=wanted):
        peft.PeftModel.from_pretrained(load_base(model_dir), tmp_path)


def test_both_names_are_refused(model_dir, text_adapter, tmp_path):
    folder, _ = text_adapter
    tensors = load_file(folder / WEIGHTS)
    name = next(iter(tensors))
    tensors[name.replace("model.layers", "model.language_model.layers")] = tensors[name].clone()
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    with pytest.raises(ValueError, match="tensors under two names"):
        peft.PeftModel.from_pretrained(load_base(model_dir), tmp_path)


def test_a_mixed_model_is_as_without_the_patch(text_dir, whole_adapter):
    """It has no check of what is left out, so it loads nothing of the other class."""
    folder, _ = whole_adapter
    model = peft.PeftMixedModel.from_pretrained(load_base(text_dir), folder)
    loaded = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert loaded
    assert not any(p.any() for p in loaded)


IN_PART = rf".*language_model.*q_proj|{LAYER}mlp\.down_proj"
NOTHING = r".*language_model.*q_proj"


def with_first_adapter(base, how, config):
    if how == "peft":
        return peft.get_peft_model(base, config, "first")
    base.add_adapter(config, "first")
    return base


def names_of(model):
    active = model.active_adapters
    return active() if callable(active) else active


@pytest.mark.regression("text_model_adapter", r"DID NOT RAISE")
@pytest.mark.parametrize(
    ("how", "kind"), [("peft", "LoraConfig"), ("native", "LoraConfig"), ("native", "LoHaConfig")]
)
def test_a_second_adapter_that_fits_in_part_is_refused(
    model_dir, text_dir, tmp_path, how, kind, request
):
    """The layers of its tensors have the first adapter."""
    if how == "native":
        request.getfixturevalue("native_adapters")
    make(load_base(model_dir), tmp_path, target_modules=IN_PART)
    config = getattr(peft, kind)(r=2, target_modules=["q_proj", "v_proj"])
    model = with_first_adapter(load_base(text_dir), how, config).eval()
    for name, parameter in model.named_parameters():
        if "first" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = text_logits(model)
    before = model.peft_config.keys(), names_of(model), adapter_names(model)
    with pytest.raises(ValueError, match=r"target_modules do not match .*q_proj"):
        model.load_adapter(str(tmp_path), adapter_name="second")
    assert (model.peft_config.keys(), names_of(model), adapter_names(model)) == before
    assert_same(text_logits(model), expected)


def test_a_second_adapter_that_does_not_fit_is_refused(model_dir, text_dir, tmp_path):
    """Some releases of PEFT refuse it themselves."""
    make(load_base(model_dir), tmp_path, target_modules=NOTHING)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(load_base(text_dir), config, "first")
    with pytest.raises(ValueError, match=r"target_modules do not match|not found in the base"):
        model.load_adapter(tmp_path, "second")


def adapter_names(model):
    return [name for name, _ in model.named_parameters() if "lora_" in name or "hada_" in name]


@pytest.mark.parametrize("how", ["peft", "native"])
def test_a_refused_first_adapter_has_no_effect(model_dir, text_dir, tmp_path, how, request):
    if how == "native":
        request.getfixturevalue("native_loading")
    make(load_base(model_dir), tmp_path, target_modules=IN_PART)
    base = load_base(text_dir)
    expected = text_logits(base)
    with pytest.raises(ValueError, match=r"target_modules do not match .*q_proj"):
        attach(base, tmp_path, how)
    assert_same(text_logits(base), expected)
    if how == "native":
        assert not adapter_names(base)


def test_a_refused_file_leaves_an_adapter_as_it_was(model_dir, text_dir, text_adapter, tmp_path):
    """The adapter exists, and a file for the other class is loaded into it."""
    folder, _ = text_adapter
    make(load_base(model_dir), tmp_path, target_modules=r".*language_model.*(?:up|down)_proj")
    model = peft.PeftModel.from_pretrained(load_base(text_dir), folder)
    expected = text_logits(model)
    with pytest.raises(ValueError, match=r"target_modules do not match .*up_proj"):
        model.load_adapter(tmp_path, "default")
    assert_same(text_logits(model), expected)
    assert list(model.peft_config) == ["default"]


@pytest.mark.regression("text_model_adapter", NOT_LOADED)
@pytest.mark.parametrize("how", ["peft", "native"])
def test_a_second_adapter_on_the_same_layers(
    model_dir, text_dir, whole_adapter, how, request, caplog
):
    if how == "native":
        request.getfixturevalue("native_adapters")
    folder, _ = whole_adapter
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    model = with_first_adapter(load_base(text_dir), how, config)
    with caplog.at_level(logging.WARNING, logger=OURS):
        model.load_adapter(str(folder), adapter_name="second")
    model.set_adapter("second")
    loaded(model, folder, "language_model", "second")
    (message,) = [record.getMessage() for record in caplog.records if record.name == OURS]
    assert "all other tensors are loaded" in message


def test_an_adapter_is_loaded_after_the_last_one_was_deleted(model_dir, adapter_dir):
    """PEFT asks the active adapter for its config, which is gone."""
    import peft
    from packaging.version import Version
    from peft import PeftModel

    if Version(peft.__version__) < Version("0.19"):
        pytest.skip("PEFT 0.18 gives other logits here, also without the patches")
    model = PeftModel.from_pretrained(load_model(model_dir), adapter_dir).eval()
    expected = logits(model)
    model.delete_adapter("default")
    model.load_adapter(adapter_dir, "again")
    model.set_adapter("again")
    assert_same(logits(model), expected)
