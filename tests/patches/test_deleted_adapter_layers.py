"""A model can be saved after transformers' own delete_adapter."""

from __future__ import annotations

import pytest

from tests.support import assert_same, load_model, logits, split

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("native_adapters")

Q_PROJ = r".*language_model\.layers\.\d+\.self_attn\.q_proj"
#: from_pretrained initializes missing weights randomly; it fails if they are quantized
RANDOM = r"text logits differ|\"normal_kernel_cpu\" not implemented for 'Byte'"
LEFT = r"base_layer"


def config(**options):
    return peft.LoraConfig(r=4, target_modules=Q_PROJ, init_lora_weights=False, **options)


def modules(model):
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.regression("deleted_adapter_layers", RANDOM)
@pytest.mark.parametrize("kind", [None, "nf4-nested"], ids=["bf16", "nf4"])
def test_deleted_and_saved(model_dir, tmp_path, kind):
    expected = logits(load_model(model_dir, kind))
    model = load_model(model_dir, kind)
    model.add_adapter(config())
    model.delete_adapter("default")
    model.save_pretrained(tmp_path)
    assert_same(logits(model), expected)
    # The saved config contains the quantization config.
    from transformers import Gemma4ForConditionalGeneration

    again = Gemma4ForConditionalGeneration.from_pretrained(
        tmp_path, device_map={"": "cpu"}, dtype="bfloat16"
    )
    assert_same(logits(again.eval()), expected)


@pytest.mark.regression("deleted_adapter_layers", LEFT)
def test_modules_are_those_of_before(model_dir):
    model = load_model(model_dir)
    before = modules(model)
    weight = model.model.language_model.layers[0].self_attn.q_proj.weight
    model.add_adapter(config(modules_to_save=["embed_vision"]))
    model.delete_adapter("default")
    assert modules(model) == before, "base_layer"
    assert model.model.language_model.layers[0].self_attn.q_proj.weight is weight


@pytest.mark.regression("deleted_adapter_layers", RANDOM, behind="offloaded_save")
def test_split(model_dir, tmp_path):
    layers = {f"model.language_model.layers.{i}": "disk" for i in (1, 4)}
    model = split(load_model(model_dir), tmp_path / "offload", {**layers, "": "cpu"})
    model.add_adapter(config())
    model.delete_adapter("default")
    expected = logits(load_model(model_dir))
    assert_same(logits(model), expected)
    model.save_pretrained(tmp_path / "saved")
    assert_same(logits(load_model(tmp_path / "saved")), expected)


def test_one_of_two(model_dir):
    model = load_model(model_dir)
    model.add_adapter(config(), "first")
    expected = logits(model, ["text"])
    model.add_adapter(config(), "second")
    model.delete_adapter("second")
    model.set_adapter("first")
    assert_same(logits(model, ["text"]), expected)
    assert hasattr(model.model.language_model.layers[0].self_attn.q_proj, "base_layer")


def test_another_adapter_afterwards(model_dir, language_adapter_dir):
    def loaded(model):
        model.load_adapter(str(language_adapter_dir))
        return logits(model.eval(), ["text"])

    expected = loaded(load_model(model_dir))
    model = load_model(model_dir)
    model.add_adapter(config())
    model.delete_adapter("default")
    assert_same(loaded(model), expected)


def test_other_adapters_stay(model_dir):
    """Those that PEFT injected into a submodule, or that another model with the same layers has."""
    from peft import LoraConfig, inject_adapter_in_model

    model = load_model(model_dir)
    config = LoraConfig(target_modules=["gate_proj"], init_lora_weights=False)
    inject_adapter_in_model(config, model.model.language_model, "other")
    expected = logits(model, ["text"])
    model.add_adapter(LoraConfig(target_modules=r".*language_model.*q_proj"), "own")
    model.delete_adapter("own")
    assert_same(logits(model, ["text"]), expected)
    assert any("lora_A.other" in name for name, _ in model.named_parameters())


@pytest.mark.regression("deleted_adapter_layers", RANDOM)
def test_trainable_tokens(model_dir, tmp_path):
    from peft import LoraConfig

    model = load_model(model_dir)
    expected = logits(model, ["text"])
    tokens = {"embed_tokens_per_layer": [5, 6]}
    targets = r".*language_model.*gate_proj"
    model.add_adapter(LoraConfig(target_modules=targets, trainable_token_indices=tokens), "own")
    model.delete_adapter("own")
    model.save_pretrained(tmp_path)
    assert_same(logits(load_model(tmp_path), ["text"]), expected)
