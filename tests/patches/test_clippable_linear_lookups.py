"""PEFT methods with their own search for targets find the layers in Gemma4ClippableLinear."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from packaging.version import Version
from peft import get_peft_model_state_dict

import gemma4_compat
from gemma4_compat.tiny import image_inputs
from tests.support import load_model

OLD_PEFT = Version(peft.__version__) < Version("0.19")


@pytest.fixture
def base(model_dir):
    return load_model(model_dir).float()


def unpatched():
    return gemma4_compat.disabled("clippable_linear", "clippable_linear_lookups")


def eva_of(base):
    from peft.tuners.lora.eva import get_eva_state_dict

    def eva(targets):
        config = peft.LoraConfig(
            target_modules=targets, init_lora_weights="eva", r=2,
            eva_config=peft.EvaConfig(rho=1.0, use_label_mask=False),
        )  # fmt: skip
        return get_eva_state_dict(
            base, [image_inputs(base.config)], config, prepare_model_inputs_fn=None,
            prepare_layer_inputs_fn=lambda layer_input, *_: layer_input[0].flatten(0, -2),
            show_progress_bar=False,
        )  # fmt: skip

    return eva


@pytest.fixture
def native_wrappers(pristine):
    """Simulate a PEFT whose tuners support the wrappers: clippable_linear is not applied."""
    from gemma4_compat.patches.adapters.clippable_linear import PATCH

    gemma4_compat.uninstall("clippable_linear")
    affects, PATCH.affects = PATCH.affects, ("peft<0.1",)
    status = gemma4_compat.install("clippable_linear")
    yield [status[name].state.value for name in ("clippable_linear", "clippable_linear_lookups")]
    PATCH.affects = affects


def test_eva_does_not_need_the_code_of_clippable_linear(base, native_wrappers):
    assert native_wrappers == ["unaffected", "applied"]
    eva = eva_of(base)
    expected = eva(r".*vision_tower.*\.q_proj\.linear")
    found = eva(r".*vision_tower.*\.q_proj")
    assert expected
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.regression("clippable_linear_lookups", r"nothing was found for the towers")
def test_eva(base):
    eva = eva_of(base)
    with unpatched():
        expected = eva(r".*vision_tower.*\.q_proj\.linear")
    found = eva(r".*vision_tower.*\.q_proj")
    assert expected
    assert found, "nothing was found for the towers"
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.skipif(OLD_PEFT, reason="this PEFT has no LoRA-GA")
def test_lora_ga(base):
    from peft.tuners.lora import LoraGAConfig, preprocess_loraga

    def gradients(targets):
        model = copy.deepcopy(base)
        torch.manual_seed(0)
        config = peft.LoraConfig(
            target_modules=targets, init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig(), r=2
        )
        batch = image_inputs(model.config)

        def step():
            model(**batch, labels=batch["input_ids"]).loss.backward()

        preprocess_loraga(model, config, step)
        return peft.get_peft_model(model, config).eval()

    with unpatched():
        expected = gradients(r".*vision_tower.*\.q_proj\.linear")
    found = gradients(r".*vision_tower.*\.q_proj")
    expected, found = (get_peft_model_state_dict(model) for model in (expected, found))
    assert any("vision_tower" in key for key in expected)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
