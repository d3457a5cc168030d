"""accelerate removes its hooks from a split model with adapters and loads all weights."""

from __future__ import annotations

import pytest
import torch

from tests.support import assert_same, load_model, logits, split

peft = pytest.importorskip("peft")

NOT_ITS_OWN = r"object has no attribute '(_hf_hook|_old_forward)'"
LAYER = "model.language_model.layers.1"
MAP = {LAYER: "disk", "model.language_model.embed_tokens": "disk", "": "cpu"}
LORA = {"r": 4, "target_modules": [f"{LAYER}.self_attn.q_proj"], "init_lora_weights": False}
CONFIGS = {
    "LoRA": lambda: peft.LoraConfig(**LORA),
    "trainable tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[1, 2]),
}


def submodules(model):
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)


def recursively(model):
    from accelerate.hooks import remove_hook_from_module

    assert remove_hook_from_module(model, recurse=True) is model


def adapted(base, config):
    torch.manual_seed(0)
    return peft.get_peft_model(base, config).eval()


def with_hooks(model):
    return [name for name, module in model.named_modules() if "_hf_hook" in vars(module)]


@pytest.mark.regression("hook_removal", NOT_ITS_OWN)
@pytest.mark.parametrize("remove", [submodules, recursively])
@pytest.mark.parametrize("kind", CONFIGS)
def test_no_hook_is_left(model_dir, tmp_path, kind, remove):
    check(model_dir, tmp_path, CONFIGS[kind](), remove)


@pytest.mark.regression("hook_removal", NOT_ITS_OWN, behind="offloaded_modules_to_save")
@pytest.mark.parametrize("remove", [submodules, recursively])
def test_modules_to_save(model_dir, tmp_path, remove):
    config = peft.LoraConfig(**LORA, modules_to_save=[f"{LAYER}.mlp.up_proj"])
    check(model_dir, tmp_path, config, remove)


def check(model_dir, tmp_path, config, remove):
    expected = logits(adapted(load_model(model_dir), config), ["text"])
    model = adapted(split(load_model(model_dir), tmp_path, MAP), config)
    assert with_hooks(model)
    remove(model)
    assert not with_hooks(model)
    assert not [name for name, p in model.named_parameters() if p.is_meta]
    assert_same(logits(model, ["text"]), expected)


@pytest.mark.regression("hook_removal", NOT_ITS_OWN)
def test_dispatched_again(model_dir, tmp_path):
    """The model is dispatched again after its hooks are removed, as dispatch_model does."""
    expected = logits(adapted(load_model(model_dir), CONFIGS["LoRA"]()), ["text"])
    model = adapted(split(load_model(model_dir), tmp_path / "one", MAP), CONFIGS["LoRA"]())
    submodules(model)
    base = split(model.get_base_model(), tmp_path / "two", {LAYER: "disk", "": "cpu"})
    assert base.get_submodule(LAYER).mlp.up_proj.weight.is_meta
    assert_same(logits(model, ["text"]), expected)


def test_compiled(model_dir, tmp_path):
    """torch.compile's wrapper forwards attributes as well; it deletes them on the inner module."""
    from accelerate.hooks import remove_hook_from_module

    model = split(load_model(model_dir), tmp_path, MAP)
    with_patch = torch.compile(model, backend="eager")
    remove_hook_from_module(with_patch)
    assert "_hf_hook" not in vars(model)


@pytest.mark.parametrize("recurse", [False, True])
def test_models_without_wrappers(model_dir, tmp_path, recurse):
    from accelerate.hooks import remove_hook_from_module

    model = split(load_model(model_dir), tmp_path, MAP)
    assert remove_hook_from_module(model, recurse=recurse) is model
    assert "_hf_hook" not in vars(model)
    assert bool(with_hooks(model)) is not recurse
