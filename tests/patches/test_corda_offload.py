"""CorDA prepares a split model in the same way as a model on one device."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import text_inputs
from tests.support import adapter_parameters, assert_same, load_model, logits, split

peft = pytest.importorskip("peft")

META = r"meta is not on the expected device|cannot be called on meta tensors"
LAYER = "model.language_model.layers.1"
TARGETS = [f"{LAYER}.mlp.up_proj", f"{LAYER}.self_attn.q_proj"]
MAPS = {
    "layer": {LAYER: "disk", "": "cpu"},
    "layer and tower": {LAYER: "disk", "model.vision_tower": "disk", "": "cpu"},
}


def prepared(base, method):
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    config = peft.LoraConfig(
        r=4,
        init_lora_weights="corda",
        target_modules=TARGETS,
        corda_config=CordaConfig(corda_method=method),
    )
    inputs = text_inputs(base.config)

    def run():
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            ids = torch.randint(5, 500, inputs["input_ids"].shape, generator=generator)
            with torch.no_grad():
                base(**{**inputs, "input_ids": ids})

    preprocess_corda(base, config, run_model=run)
    torch.manual_seed(0)
    return peft.get_peft_model(base, config).eval()


@pytest.mark.regression("corda_offload", META)
@pytest.mark.parametrize("offloaded", MAPS)
@pytest.mark.parametrize("method", ["ipm", "kpm"])
def test_same_as_on_one_device(model_dir, tmp_path, offloaded, method):
    whole = prepared(load_model(model_dir), method)
    model = prepared(split(load_model(model_dir), tmp_path, MAPS[offloaded]), method)
    expected = adapter_parameters(whole)
    found = adapter_parameters(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().sum() > 0
        assert torch.equal(found[name], value), name
    assert_same(logits(model, ["text"]), logits(whole, ["text"]))
    weight = model.get_base_model().get_submodule(TARGETS[0]).base_layer.weight
    assert weight.is_meta
