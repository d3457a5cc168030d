"""A saved checkpoint names the modules that were not quantized because of the device map."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gemma4_compat.tiny import TOWERS
from tests.support import assert_same, load_model, logits

#: For bitsandbytes' quantizers, "cpu" in a map means offloaded, but a torch.device does not.
DEVICE = torch.device("cpu")
RESIDENT = ("model.language_model", "model.embed_vision", "model.embed_audio", "lm_head")
MAP = {**dict.fromkeys(TOWERS, "cpu"), **dict.fromkeys(RESIDENT, DEVICE)}
SKIPPED = pytest.mark.parametrize("skipped", [None, ["lm_head"]])


def load(path, kind, device_map=MAP, skipped=None):
    return load_model(
        path,
        kind,
        device_map,
        llm_int8_enable_fp32_cpu_offload=True,
        llm_int8_skip_modules=skipped,
    )


def saved_skips(folder):
    config = json.loads((folder / "config.json").read_text())
    return config["quantization_config"]["llm_int8_skip_modules"]


@pytest.mark.regression("saved_skip_modules", r"^AssertionError: $|has no attribute 'CB'")
@pytest.mark.parametrize("kind", ["nf4", "nf4-nested", "int8"])
@SKIPPED
def test_loaded_again_on_one_device(model_dir, kind, skipped, tmp_path, request):
    if kind == "int8":
        request.getfixturevalue("eight_bit_files")
    model = load(model_dir, kind, skipped=skipped)
    assert type(model.model.vision_tower.patch_embedder.input_proj) is nn.Linear
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, None, {"": DEVICE})
    assert_same(logits(again), logits(model))
    assert [type(m).__name__ for m in again.modules()] == [
        type(m).__name__ for m in model.modules()
    ]


@SKIPPED
def test_the_models_own_config_is_unchanged(model_dir, skipped, tmp_path):
    model = load(model_dir, "nf4", skipped=skipped)
    config = model.config.quantization_config
    model.save_pretrained(tmp_path)
    assert model.config.quantization_config is config
    assert config.llm_int8_skip_modules == skipped
    assert set(saved_skips(tmp_path)) >= {*TOWERS, "lm_head"}


@SKIPPED
def test_other_models_are_saved_as_ever(model_dir, skipped, tmp_path):
    load_model(model_dir, "nf4", llm_int8_skip_modules=skipped).save_pretrained(tmp_path)
    assert saved_skips(tmp_path) == skipped
    load_model(model_dir).save_pretrained(tmp_path / "bf16")
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())
