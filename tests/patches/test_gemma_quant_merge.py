"""QAT checkpoints in Google's own format: adapters, offloading, and merging, which is refused."""

from __future__ import annotations

import pytest
import torch

import gemma4_compat
from gemma4_compat.tiny import LANGUAGE_TARGETS
from tests.support import assert_same, logits, save_qat, split

peft = pytest.importorskip("peft")
gemma_quant = pytest.importorskip("transformers.integrations.gemma_quant")

LANGUAGE = "model.language_model"
INTEGERS = r".*language_model\.layers\.\d+\.self_attn\.o_proj"  # 8 bit


@pytest.fixture(scope="module")
def qat_dir(model_dir, tmp_path_factory):
    return save_qat(model_dir, tmp_path_factory.mktemp("qat"))


def load(qat_dir, device_map=None, **options):
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(
        qat_dir, dtype=torch.bfloat16, device_map=device_map or {"": "cpu"}, **options
    )
    return model.eval()


def adapted(model, targets=LANGUAGE_TARGETS):
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.regression("gemma_quant_merge", r"DID NOT RAISE")
def test_merge_is_refused(qat_dir):
    model = adapted(load(qat_dir), INTEGERS)
    expected = logits(model, ["text"])
    with pytest.raises(ValueError, match="cannot be merged into 6 quantized layers"):
        model.merge_and_unload(safe_merge=True)
    assert_same(logits(model, ["text"]), expected)


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_merge_of_packed_weights(qat_dir, merge):
    model = adapted(load(qat_dir))
    with pytest.raises(ValueError, match="gemma4-compat merge BASE ADAPTER OUT"):
        getattr(model, merge)()


def test_adapters_elsewhere_merge(qat_dir):
    model = adapted(load(qat_dir), r".*vision_tower.*\.q_proj\.linear")
    name = "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear"
    layer = model.get_base_model().get_submodule(name)
    delta = layer.get_delta_weight("default").float()
    expected = (layer.weight.float() + delta).bfloat16()
    assert torch.equal(model.merge_and_unload().get_submodule(name).weight, expected)


def test_layer_with_an_adapter(qat_dir):
    """PEFT adds the adapter's outputs to those of the layer."""
    model = adapted(load(qat_dir))
    layer = model.get_submodule(f"base_model.model.{LANGUAGE}.layers.0.mlp.down_proj")
    assert isinstance(layer.base_layer, gemma_quant.QuantizedLinear)
    inputs = torch.randn(3, layer.in_features).bfloat16()
    with torch.no_grad():
        added = layer.lora_B["default"](layer.lora_A["default"](inputs.float()))
        expected = layer.base_layer(inputs) + 2 * added  # lora_alpha is 8
        assert torch.equal(layer(inputs), expected.bfloat16())


@pytest.mark.parametrize("place", ["layers.1", "embed_tokens_per_layer"])
def test_split_with_an_adapter(qat_dir, tmp_path, place):
    expected = logits(adapted(load(qat_dir)), ["text"])
    model = split(load(qat_dir), tmp_path, {f"{LANGUAGE}.{place}": "disk", "": "cpu"})
    assert_same(logits(adapted(model), ["text"]), expected)


def test_per_layer_embeddings_loaded_to_the_disk(qat_dir, tmp_path):
    device_map = {f"{LANGUAGE}.embed_tokens_per_layer": "disk", "": "cpu"}
    model = load(qat_dir, device_map, offload_folder=tmp_path)
    assert model.get_submodule(f"{LANGUAGE}.embed_tokens_per_layer").embedding_quantized.is_meta
    assert_same(logits(model), logits(load(qat_dir)))


def test_inspection_counts_the_packed_bytes(qat_dir):
    model = load(qat_dir)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert f"{size / 2**20:.1f} MiB" in str(gemma4_compat.inspect_model(model))
