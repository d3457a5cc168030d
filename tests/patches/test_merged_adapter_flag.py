"""A model can be saved after PEFT has merged an adapter of transformers' own."""

from __future__ import annotations

import pytest

from tests.support import assert_same, load_model, logits, split

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("native_adapters")

NO_ADAPTERS = r"UnboundLocalError.*active_adapters"
OTHER_LAYERS = r".*language_model\.layers\.\d+\.self_attn\.o_proj"


def with_adapter(model, adapter_dir, way):
    if way == "loaded":
        model.load_adapter(str(adapter_dir))
    else:
        config = peft.LoraConfig.from_pretrained(adapter_dir)
        config.inference_mode, config.init_lora_weights = False, False
        model.add_adapter(config)
    return model.eval()


def around(model, way):
    """Wrap a model that has an adapter of transformers' own in a PeftModel."""
    if way == "same adapter":
        return peft.PeftModel(model, model.peft_config["default"])
    config = peft.LoraConfig(r=4, target_modules=OTHER_LAYERS, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def assert_saved_whole(model, folder):
    expected = logits(model, ["text"])
    model.save_pretrained(folder)
    assert not (folder / "adapter_config.json").exists()
    assert_same(logits(load_model(folder), ["text"]), expected)


@pytest.mark.regression("merged_adapter_flag", NO_ADAPTERS)
@pytest.mark.parametrize("way", ["loaded", "added"])
@pytest.mark.parametrize("outer", ["same adapter", "another"])
def test_merged_and_saved(model_dir, language_adapter_dir, tmp_path, way, outer):
    model = around(with_adapter(load_model(model_dir), language_adapter_dir, way), outer)
    merged = model.merge_and_unload().eval()
    assert_saved_whole(merged, tmp_path / "saved")
    assert not hasattr(merged, "peft_config")


@pytest.mark.regression("merged_adapter_flag", NO_ADAPTERS)
def test_unloaded_and_saved(model_dir, language_adapter_dir, tmp_path):
    model = with_adapter(load_model(model_dir), language_adapter_dir, "loaded")
    model = around(model, "same adapter").unload().eval()
    assert_saved_whole(model, tmp_path / "saved")
    assert_same(logits(model), logits(load_model(model_dir)))


@pytest.mark.regression("merged_adapter_flag", NO_ADAPTERS)
def test_split(model_dir, language_adapter_dir, tmp_path):
    layers = {f"model.language_model.layers.{i}": "disk" for i in (1, 4)}
    model = split(load_model(model_dir), tmp_path / "offload", {**layers, "": "cpu"})
    model = with_adapter(model, language_adapter_dir, "loaded")
    whole = with_adapter(load_model(model_dir), language_adapter_dir, "loaded")
    model, whole = (around(m, "same adapter").merge_and_unload().eval() for m in (model, whole))
    assert_same(logits(model, ["text"]), logits(whole, ["text"]))
    assert_saved_whole(model, tmp_path / "saved")


@pytest.mark.regression("merged_adapter_flag", r"active_adapters|peft_config")
def test_adapters_can_be_loaded_again(model_dir, language_adapter_dir):
    model = with_adapter(load_model(model_dir), language_adapter_dir, "loaded")
    expected = logits(model, ["text"])
    model = around(model, "same adapter").unload()
    with pytest.raises(ValueError, match="No adapter loaded"):
        model.active_adapters()
    model = with_adapter(model, language_adapter_dir, "loaded")
    assert model.active_adapters() == ["default"]
    assert_same(logits(model, ["text"]), expected)


def test_peft_alone(model_dir, language_adapter_dir, tmp_path):
    model = peft.PeftModel.from_pretrained(load_model(model_dir), language_adapter_dir)
    assert_saved_whole(model.merge_and_unload().eval(), tmp_path)


def test_adapters_that_stay_are_saved(model_dir, language_adapter_dir, tmp_path):
    model = with_adapter(load_model(model_dir), language_adapter_dir, "loaded")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
    again = with_adapter(load_model(model_dir), tmp_path, "loaded")
    assert_same(logits(again, ["text"]), logits(model, ["text"]))
