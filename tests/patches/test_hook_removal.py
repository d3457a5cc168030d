"""accelerate's hooks come off a split model with adapters; all weights are there afterwards."""

from __future__ import annotations

import pytest
import torch

from tests.support import assert_same, load_model, logits, split

peft = pytest.importorskip("peft")

#: The latter where modules_to_save meets another bug before.
NOT_ITS_OWN = r"object has no attribute '(_hf_hook|_old_forward)'|SequentialHook"
LAYER = "model.language_model.layers.1"
MAP = {LAYER: "disk", "model.language_model.embed_tokens": "disk", "": "cpu"}
LORA = {"r": 4, "target_modules": [f"{LAYER}.self_attn.q_proj"], "init_lora_weights": False}
CONFIGS = {
    "LoRA": lambda: peft.LoraConfig(**LORA),
    "modules_to_save": lambda: peft.LoraConfig(**LORA, modules_to_save=[f"{LAYER}.mlp.up_proj"]),
    "trainable tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[1, 2]),
}


def submodules(model):
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)


def recursively(model):
    from accelerate.hooks import remove_hook_from_module

    assert remove_hook_from_module(model, recurse=True) is model


def adapted(base, kind):
    torch.manual_seed(0)
    return peft.get_peft_model(base, CONFIGS[kind]()).eval()


def with_hooks(model):
    return [name for name, module in model.named_modules() if "_hf_hook" in vars(module)]


@pytest.mark.regression("hook_removal", NOT_ITS_OWN)
@pytest.mark.parametrize("remove", [submodules, recursively])
@pytest.mark.parametrize("kind", CONFIGS)
def test_no_hook_is_left(model_dir, tmp_path, kind, remove):
    expected = logits(adapted(load_model(model_dir), kind), ["text"])
    model = adapted(split(load_model(model_dir), tmp_path, MAP), kind)
    assert with_hooks(model)
    remove(model)
    assert not with_hooks(model)
    assert not [name for name, p in model.named_parameters() if p.is_meta]
    assert_same(logits(model, ["text"]), expected)


@pytest.mark.regression("hook_removal", NOT_ITS_OWN)
def test_dispatched_again(model_dir, tmp_path):
    """What dispatch_model does with a model that has hooks."""
    expected = logits(adapted(load_model(model_dir), "LoRA"), ["text"])
    model = adapted(split(load_model(model_dir), tmp_path / "one", MAP), "LoRA")
    submodules(model)
    base = split(model.get_base_model(), tmp_path / "two", {LAYER: "disk", "": "cpu"})
    assert base.get_submodule(LAYER).mlp.up_proj.weight.is_meta
    assert_same(logits(model, ["text"]), expected)


@pytest.mark.parametrize("recurse", [False, True])
def test_models_without_wrappers(model_dir, tmp_path, recurse):
    from accelerate.hooks import remove_hook_from_module

    model = split(load_model(model_dir), tmp_path, MAP)
    assert remove_hook_from_module(model, recurse=recurse) is model
    assert "_hf_hook" not in vars(model)
    assert bool(with_hooks(model)) is not recurse
