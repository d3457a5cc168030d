"""A split model that is prepared for hot-swapping gives the outputs of one device."""

from __future__ import annotations

import pytest
import torch

from tests.support import assert_same, load_model, logits, new_model, split


def saved_adapter(model_dir, folder, rank, alpha):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(rank)
    targets = r".*language_model.*(q_proj|o_proj|down_proj)"
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights=False)
    get_peft_model(load_model(model_dir), config).save_pretrained(folder)
    return str(folder)


@pytest.mark.regression("hotswap_scalings", r"device meta is not on the expected device")
def test_offloaded_layer_keeps_its_scaling():
    from accelerate import cpu_offload
    from peft import LoraConfig, get_peft_model
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["0"], init_lora_weights=False)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), config)
    expected = model(torch.eye(4))
    layer = model.base_model.model[0]
    cpu_offload(layer.base_layer, execution_device=torch.device("cpu"))
    prepare_model_for_compiled_hotswap(model)
    assert torch.equal(model(torch.eye(4)), expected)
    assert layer.scaling["default"].item() == 1.5


@pytest.mark.parametrize("kind", [None, "nf4"], ids=["bf16", "nf4"])
@pytest.mark.parametrize("rank", [None, 4, 8])
def test_hotswap_on_a_split_model(model_dir, kind, rank, tmp_path):
    from peft import PeftModel
    from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

    first = saved_adapter(model_dir, tmp_path / "first", 4, 8)
    second = saved_adapter(model_dir, tmp_path / "second", rank or 4, 24)

    def outputs(model):
        model = PeftModel.from_pretrained(model, first).eval()
        found = [logits(model)]
        prepare_model_for_compiled_hotswap(model, target_rank=rank, config=model.peft_config)
        found += [logits(model), logits(model)]
        for path in (second, first):
            hotswap_adapter(model, path, "default", torch_device="cpu")
            found.append(logits(model))
        with model.disable_adapter():
            found.append(logits(model))
        return found

    expected = outputs(new_model(model_dir, kind))
    layers = {f"model.language_model.layers.{i}": "disk" for i in (1, 4)}
    found = outputs(split(new_model(model_dir, kind), tmp_path, {**layers, "": "cpu"}))
    for ours, one in zip(found, expected, strict=True):
        assert_same(ours, one)
    change = expected[3]["text"] - expected[1]["text"]
    assert change.abs().max() > 0.1
    assert_same(found[4], found[1])
