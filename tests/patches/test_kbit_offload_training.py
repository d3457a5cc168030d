"""accelerate prepares offloaded 4-bit models for training if the offloaded weights are frozen."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import BROAD_TARGETS, TOWERS, text_inputs
from tests.support import adapter_parameters, load_model, split

REFUSED = r"You can't train a model that has been loaded in 8-bit or 4-bit precision"
LAYERS = {f"model.language_model.layers.{index}": "disk" for index in (0, 1, 4)}


def adapted(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=BROAD_TARGETS, init_lora_weights=False)
    return get_peft_model(model, config)


@pytest.fixture
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(accelerator, model, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch, losses = text_inputs(model.config), []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch, labels=batch["input_ids"]).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, adapter_parameters(model)


def assert_same_training(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert not [name for name in found[1] if not torch.equal(found[1][name], expected[1][name])]


@pytest.mark.regression("kbit_offload_training", REFUSED)
def test_frozen_tower_on_disk(accelerator, model_dir, tmp_path):
    """transformers does not quantize modules that a map offloads, so the tower is not quantized."""
    model = load_model(model_dir, "nf4", llm_int8_skip_modules=[*TOWERS, "lm_head"])
    device_map = {"model.audio_tower": "disk", "": "cpu"}
    model = split(model, tmp_path, device_map).requires_grad_(False)
    assert accelerator.prepare(model) is model


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_offloaded_decoder_layers(accelerator, model_dir, kind, tmp_path):
    """The offloaded layers are in the autograd graph, unlike towers that a text does not use."""
    expected = trained(accelerator, adapted(load_model(model_dir, kind)))
    assert len(set(expected[0])) == 3
    model = split(load_model(model_dir, kind), tmp_path, {**LAYERS, "": "cpu"})
    device_map = dict(model.hf_device_map)
    assert_same_training(trained(accelerator, adapted(model)), expected)
    assert model.hf_device_map == device_map


def test_offloaded_parameters_to_train_are_refused(accelerator, model_dir, tmp_path):
    model = split(load_model(model_dir, "nf4"), tmp_path, {**LAYERS, "": "cpu"})
    assert any(p.is_meta and p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match=REFUSED):
        accelerator.prepare(model)
    assert "disk" in model.hf_device_map.values()


def test_int8_is_refused_as_before(accelerator, model_dir, tmp_path):
    model = split(load_model(model_dir, "int8"), tmp_path, {**LAYERS, "": "cpu"})
    with pytest.raises(ValueError, match=REFUSED):
        accelerator.prepare(model.requires_grad_(False))


def test_one_device_is_prepared_as_before(accelerator, model_dir):
    model = adapted(load_model(model_dir, "nf4"))
    assert accelerator.prepare(model) is model
