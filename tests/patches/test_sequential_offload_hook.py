"""accelerate reads and saves the weights of modules with two hooks."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator, cpu_offload, disk_offload
from accelerate.hooks import SequentialHook
from accelerate.utils import align_module_device, has_offloaded_params
from accelerate.utils.modeling import get_state_dict_offloaded_model

from gemma4_compat.model.hooks import offload_hook
from tests.support import assert_same, load_model, logits, split

NO_VALUE = r"is on the meta device, we need a `value` to put in on cpu"
CPU = torch.device("cpu")


def table(model):
    return model.model.language_model.embed_tokens_per_layer


def offload_table(model, how, folder):
    """Offload one module that has its own weights, as users do with per-layer embeddings."""
    if how == "cpu":
        cpu_offload(table(model), execution_device=CPU)
    else:
        disk_offload(table(model), str(folder), execution_device=CPU)
    assert isinstance(table(model)._hf_hook, SequentialHook)
    assert table(model).weight.is_meta
    return model


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.regression("sequential_offload_hook", NO_VALUE)
@pytest.mark.parametrize("how", ["cpu", "disk"])
@pytest.mark.parametrize("kind", [None, "nf4-nested"], ids=["bf16", "nf4"])
def test_state_dict_of_a_model_with_one_offloaded_module(model_dir, tmp_path, how, kind):
    expected = load_model(model_dir, kind).state_dict()
    model = offload_table(load_model(model_dir, kind), how, tmp_path)
    assert_same_state(get_state_dict_offloaded_model(model), expected)
    assert table(model).weight.is_meta, "offloaded as before"


@pytest.mark.regression("sequential_offload_hook", NO_VALUE, behind="root_device_map")
def test_state_dict_of_a_split_model(model_dir, tmp_path):
    expected = load_model(model_dir).state_dict()
    model = split(load_model(model_dir), tmp_path)
    assert_same_state(get_state_dict_offloaded_model(model), expected)


@pytest.mark.regression("sequential_offload_hook", r"some parameters are on the meta device")
def test_saved_by_accelerator(model_dir, tmp_path):
    from safetensors.torch import load_file

    whole = load_model(model_dir)
    expected = whole.state_dict()
    model = offload_table(load_model(model_dir), "cpu", tmp_path)
    Accelerator(cpu=True).save_model(model, str(tmp_path / "saved"))
    found = load_file(tmp_path / "saved" / "model.safetensors")
    tied = {"lm_head.weight", "model.language_model.embed_tokens.weight"} - found.keys()
    assert len(tied) == 1
    assert_same_state(found, {n: t for n, t in expected.items() if n not in tied})
    assert_same(logits(model), logits(whole))


@pytest.mark.regression("sequential_offload_hook", r"nothing is offloaded")
def test_what_is_offloaded(model_dir, tmp_path):
    model = offload_table(load_model(model_dir), "cpu", tmp_path)
    found = [module for module in model.modules() if has_offloaded_params(module)]
    assert found == [table(model)], "nothing is offloaded"


@pytest.mark.regression("sequential_offload_hook", NO_VALUE)
def test_hooks_stay_after_an_error(model_dir, tmp_path):
    """After an error in the block, the weights are offloaded again, and the module runs."""
    whole = load_model(model_dir)
    model = offload_table(load_model(model_dir), "cpu", tmp_path)
    hook = table(model)._hf_hook

    def users_block():
        with align_module_device(table(model), CPU):
            assert torch.equal(table(model).weight, table(whole).weight)
            raise KeyError("users")

    with pytest.raises(KeyError, match="users"):
        users_block()
    assert table(model)._hf_hook is hook
    assert offload_hook(table(model)).execution_device == CPU
    assert table(model).weight.is_meta
    assert_same(logits(model), logits(whole))


def test_modules_that_are_not_offloaded(model_dir):
    model = load_model(model_dir)
    assert not any(map(has_offloaded_params, model.modules()))
    norm = model.model.language_model.norm
    before = norm.weight
    with align_module_device(norm):
        assert norm.weight is before
