"""The nested adapters of a mixed model are merged into offloaded layers."""

from __future__ import annotations

import pytest
import torch

from tests.support import assert_same, load_model, logits, split

peft = pytest.importorskip("peft")

#: The last error occurs with safe_merge, which reads the values.
LOST = r"text logits (differ|are not finite)|cannot be called on meta tensors"
Q_PROJ = r".*language_model\.layers\.\d+\.self_attn\.q_proj"
OTHERS = r".*language_model\.layers\.\d+\.(self_attn\.[qo]_proj|mlp\.up_proj)"
MAP = {
    "model.language_model.layers.1": "disk",
    "model.language_model.layers.4": "disk",
    "": "cpu",
}


def make(base, order=("lora", "loha")):
    """Add the adapters in this order; on a common layer, each adapter wraps the previous one."""
    configs = {
        "lora": peft.LoraConfig(r=4, target_modules=Q_PROJ),
        "loha": peft.LoHaConfig(r=4, target_modules=OTHERS),
        "lokr": peft.LoKrConfig(r=4, target_modules=Q_PROJ),
    }
    first, *rest = order
    model = peft.get_peft_model(base, configs[first], first, mixed=True)
    for name in rest:
        model.add_adapter(name, configs[name])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                {"lora_A", "lora_B"}.intersection(name.split("."))
                or "hada_" in name
                or "lokr_" in name
            ):
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.set_adapter(list(order))
    return model.eval()


@pytest.mark.regression("mixed_model_merge", LOST)
@pytest.mark.parametrize("order", [("lora", "loha"), ("loha", "lora"), ("lora", "loha", "lokr")])
@pytest.mark.parametrize("safe", [False, True])
def test_merged(model_dir, tmp_path, order, safe):
    whole = make(load_model(model_dir), order).merge_and_unload(safe_merge=safe)
    model = make(split(load_model(model_dir), tmp_path, MAP), order)
    merged = model.merge_and_unload(safe_merge=safe)
    assert merged.model.language_model.layers[1].self_attn.q_proj.weight.is_meta
    assert not [m for m in merged.modules() if hasattr(m, "get_base_layer")]
    assert_same(logits(merged, ["text"]), logits(whole, ["text"]))


@pytest.mark.regression("mixed_model_merge", LOST)
def test_one_of_them(model_dir, tmp_path):
    whole = make(load_model(model_dir)).merge_and_unload(adapter_names=["loha"])
    model = make(split(load_model(model_dir), tmp_path, MAP))
    assert_same(
        logits(model.merge_and_unload(adapter_names=["loha"]), ["text"]), logits(whole, ["text"])
    )


def test_unloaded(model_dir, tmp_path):
    """unload() does not merge, so the weights are those of the base model."""
    expected = logits(load_model(model_dir), ["text"])
    model = make(split(load_model(model_dir), tmp_path, MAP))
    assert_same(logits(model.unload(), ["text"]), expected)


def test_merged_in_place_and_back(model_dir, tmp_path):
    """merge_adapter and unmerge_adapter load the offloaded weights."""
    whole = make(load_model(model_dir))
    model = make(split(load_model(model_dir), tmp_path, MAP))
    for each in (whole, model):
        each.base_model.merge_adapter()
    assert_same(logits(model, ["text"]), logits(whole, ["text"]))
    for each in (whole, model):
        each.base_model.unmerge_adapter()
    assert_same(logits(model, ["text"]), logits(whole, ["text"]))
