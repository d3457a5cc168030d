"""A QAT checkpoint in Google's own format is loaded with any of its parts on the disk."""

from __future__ import annotations

import pytest
import torch

import gemma4_compat
from gemma4_compat.tiny import TOWERS
from tests.support import assert_same, logits, save_qat

pytest.importorskip("transformers.integrations.gemma_quant")

LANGUAGE = "model.language_model"


@pytest.fixture(scope="module")
def qat_dir(model_dir, tmp_path_factory):
    return save_qat(model_dir, tmp_path_factory.mktemp("qat"))


def load(folder, device_map=None, **options):
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=device_map or {"": "cpu"}, **options
    ).eval()


@pytest.mark.regression("gemma_quant_disk", r"expected a floating-point or complex dtype")
@pytest.mark.parametrize("parts", [[f"{LANGUAGE}.layers.1", f"{LANGUAGE}.layers.5"], ["lm_head"]])
def test_layers_on_the_disk(qat_dir, tmp_path, parts):
    model = load(qat_dir, {**dict.fromkeys(parts, "disk"), "": "cpu"}, offload_folder=tmp_path)
    assert_same(logits(model), logits(load(qat_dir)))


@pytest.mark.parametrize("parts", [TOWERS, [f"{LANGUAGE}.embed_tokens", "lm_head"], ["model"]])
def test_other_parts_on_the_disk(qat_dir, tmp_path, parts):
    model = load(qat_dir, {**dict.fromkeys(parts, "disk"), "": "cpu"}, offload_folder=tmp_path)
    assert gemma4_compat.inspect_model(model).ok
    assert_same(logits(model), logits(load(qat_dir)))


def test_missing_weights_still_raise(qat_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    name = f"{LANGUAGE}.layers.1.mlp.up_proj.weight"
    weights = load_file(qat_dir / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((qat_dir / "config.json").read_bytes())
    with pytest.raises((RuntimeError, NotImplementedError), match="normal"):
        load(tmp_path)
