"""LoRA-GA prepares a split model in the same way as a model on one device."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import text_inputs
from tests.support import adapter_parameters, assert_same, load_model, logits, offloaded, split

peft = pytest.importorskip("peft")
loraga = pytest.importorskip("peft.tuners.lora.loraga", reason="this release of PEFT has none")

LAYER = "model.language_model.layers.1"
TARGETS = [f"{LAYER}.mlp.up_proj", f"{LAYER}.self_attn.q_proj"]
MAP = {LAYER: "disk", "model.vision_tower": "disk", "": "cpu"}


def prepared(base, steps=1, cache=None):
    from peft.tuners.lora.config import LoraGAConfig

    config = peft.LoraConfig(
        r=4,
        init_lora_weights="lora_ga",
        target_modules=TARGETS,
        lora_ga_config=LoraGAConfig(),
    )
    inputs = text_inputs(base.config)

    def train():
        for _ in range(steps):
            base(**inputs, labels=inputs["input_ids"]).loss.backward()

    loraga.preprocess_loraga(base, config, train, cache_file=cache)
    torch.manual_seed(0)
    return peft.get_peft_model(base, config).eval()


@pytest.mark.regression("lora_ga_offload", r"'NoneType' object has no attribute 'detach'")
@pytest.mark.parametrize("steps", [1, 3])
def test_same_as_on_one_device(model_dir, tmp_path, steps):
    whole = prepared(load_model(model_dir), steps)
    base = split(load_model(model_dir), tmp_path, MAP)
    before = offloaded(base)
    trained = {name: p.requires_grad for name, p in base.named_parameters()}
    model = prepared(base, steps)
    expected = adapter_parameters(whole)
    found = adapter_parameters(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().sum() > 0
        assert torch.equal(found[name], value), name
    assert_same(logits(model, ["text"]), logits(whole, ["text"]))
    assert len(offloaded(model)) == len(before)
    assert any(trained.values())
    assert not [n for n, p in base.named_parameters() if p.requires_grad and "lora_" not in n]


@pytest.mark.regression("lora_ga_offload", r"have incompatible tensor type")
def test_cache_file(model_dir, tmp_path):
    cache = str(tmp_path / "cache" / "gradients.pt")
    whole = prepared(load_model(model_dir), cache=cache)
    tower = {"model.vision_tower": "disk", "": "cpu"}
    model = prepared(split(load_model(model_dir), tmp_path, tower), cache=cache)
    for name, value in adapter_parameters(whole).items():
        assert torch.equal(adapter_parameters(model)[name], value), name
