"""With DeepSpeed, the towers run in all processes though only one has an image."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.patches.training import zero_unused_tower
from gemma4_compat.tiny import audio_inputs, image_inputs
from tests.engines import QUANTIZED, check
from tests.support import load_model


@pytest.mark.xdist_group("engines")
@pytest.mark.regression("zero_unused_tower", "HANG")
@pytest.mark.parametrize(("stage", "action"), [(2, "tower trained"), (3, "text and images")])
def test_one_process_has_an_image(stage, action):
    check(f"torchrun, DeepSpeed ZeRO-{stage}", QUANTIZED, action)


@pytest.mark.parametrize("kind", ["image", "sound"])
def test_the_small_input_adds_nothing(model_dir, kind):
    """It gives all weights of the tower that a real input trains a gradient of zeros."""
    model = load_model(model_dir).model
    inputs = image_inputs(model.config) if kind == "image" else audio_inputs(model.config)
    if kind == "image":
        width, run = inputs["pixel_values"].shape[-1], zero_unused_tower._run_on_image
        real = model.get_image_features(
            inputs["pixel_values"], inputs["image_position_ids"], return_dict=True
        )
    else:
        width, run = inputs["input_features"].shape[-1], zero_unused_tower._run_on_sound
        real = model.get_audio_features(
            inputs["input_features"], inputs["input_features_mask"], return_dict=True
        )
    features = real.pooler_output
    torch.cat(list(features)).sum().backward()
    trained = {name for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    zeros: list[torch.Tensor] = []
    run(model, zeros, width, torch.device("cpu"))
    assert zeros == [0]
    zeros[0].backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == trained
    assert not any(each.any() for each in found.values())
