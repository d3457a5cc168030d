"""transformers' own load_adapter loads all adapter tensors on a split base model."""

from __future__ import annotations

import pytest
import torch

from tests.support import adapter_parameters, assert_same, load_model, logits, offloaded, split

pytestmark = pytest.mark.usefixtures("native_loading")


def values(model):
    return {
        name: parameter.detach().clone() for name, parameter in adapter_parameters(model).items()
    }


@pytest.mark.regression("native_adapter_offload", r"adapter tensors were not loaded")
def test_every_adapter_tensor_is_loaded(model_dir, language_adapter_dir, tmp_path):
    from safetensors.torch import load_file

    layers = {f"model.language_model.layers.{i}": "disk" for i in (1, 4)}
    model = split(load_model(model_dir), tmp_path, {**layers, "": "cpu"})
    model.load_adapter(str(language_adapter_dir))
    found = values(model)
    file = load_file(language_adapter_dir / "adapter_model.safetensors")
    expected = {
        key.removeprefix("base_model.model.").replace(".weight", ".default.weight"): value
        for key, value in file.items()
    }
    wrong = [
        name
        for name, value in expected.items()
        if found[name].is_meta or not torch.equal(found[name], value.to(found[name].dtype))
    ]
    assert not wrong, f"{len(wrong)} of {len(expected)} adapter tensors were not loaded"


@pytest.mark.usefixtures("native_adapters")
@pytest.mark.parametrize("kind", [None, "nf4-nested"], ids=["bf16", "nested"])
@pytest.mark.parametrize("layout", ["inner", "outer"])
def test_split_model_gives_one_device_logits(
    model_dir, adapter_dir, outer_adapter_dir, second_adapter_dir, kind, layout, tmp_path
):
    path = adapter_dir if layout == "inner" else outer_adapter_dir
    one = load_model(model_dir, kind)
    one.load_adapter(str(path))
    expected = logits(one)
    one.load_adapter(str(second_adapter_dir), "second")
    one.set_adapter("second")

    model = split(load_model(model_dir, kind), tmp_path)
    before, device_map = offloaded(model), model.hf_device_map
    model.load_adapter(str(path))
    assert {name.replace(".base_layer", "") for name in offloaded(model)} == before
    assert model.hf_device_map is device_map
    assert not [name for name, p in adapter_parameters(model).items() if p.is_meta]
    assert_same(logits(model), expected)
    model.load_adapter(str(second_adapter_dir), "second")
    model.set_adapter("second")
    assert_same(logits(model), logits(one))


@pytest.mark.usefixtures("native_adapters")
def test_add_adapter_on_a_split_model(model_dir, tmp_path):
    from peft import LoraConfig

    def adapted(model):
        torch.manual_seed(0)
        model.add_adapter(
            LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        return model.eval()

    one = adapted(load_model(model_dir))
    model = adapted(split(load_model(model_dir), tmp_path))
    assert offloaded(model)
    assert_same(logits(model), logits(one))
