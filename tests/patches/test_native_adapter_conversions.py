"""A model that had an adapter of transformers' own is saved with its original tensor names."""

from __future__ import annotations

import pytest
from safetensors import safe_open

from tests.support import load_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("native_loading")


def names(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name.replace(".base_layer.", ".") for name in file.keys()}  # noqa: SIM118


@pytest.mark.usefixtures("native_adapters")
@pytest.mark.regression("native_adapter_conversions", r"other names")
def test_deleted(model_dir, language_adapter_dir, tmp_path):
    """The names are compared without ``.base_layer``, which is the result of another bug."""
    load_model(model_dir).save_pretrained(tmp_path / "whole")
    model = load_model(model_dir)
    model.load_adapter(str(language_adapter_dir))
    model.delete_adapter("default")
    model.save_pretrained(tmp_path / "saved")
    assert names(tmp_path / "saved") == names(tmp_path / "whole"), "other names"


@pytest.mark.regression("native_adapter_conversions", r"those of the adapter")
def test_conversions_of_the_checkpoint_are_kept(model_dir, language_adapter_dir):
    model = load_model(model_dir)
    before = model._weight_conversions
    model.load_adapter(str(language_adapter_dir))
    assert model._weight_conversions is before, "those of the adapter"


@pytest.mark.usefixtures("native_adapters")
def test_a_model_that_was_not_loaded(language_adapter_dir, model_dir):
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration(Gemma4Config.from_pretrained(model_dir))
    assert not hasattr(model, "_weight_conversions")
    model.load_adapter(str(language_adapter_dir))
    assert model.active_adapters() == ["default"]
    assert not hasattr(model, "_weight_conversions")
