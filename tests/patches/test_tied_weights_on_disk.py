"""Tied weights on the disk: each module gets its own weight."""

from __future__ import annotations

import copy

import pytest
import torch

import gemma4_compat
from gemma4_compat.engine.gate import holds
from gemma4_compat.inspection import inspect_model
from tests.patches.test_disk_buffers import loaded
from tests.support import assert_same, load_model, logits

EMBEDDINGS, HEAD = "model.language_model.embed_tokens", "lm_head"
#: of the tiny model's 5.6 MB; the head is on the disk below 2 MB
BUDGETS = (1_500_000, 2_500_000, 4_000_000)


def within(budget):
    """A device map of accelerate with so many bytes on the CPU, and the rest on the disk."""

    def infer(model):
        from accelerate import infer_auto_device_map

        return infer_auto_device_map(
            model, {"cpu": budget}, no_split_module_classes=model._no_split_modules
        )

    return infer


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("device_map", ["auto", "sequential", "balanced_low_0"])
def test_budget_for_the_cpu(model_dir, device_map, budget, tmp_path):
    expected = logits(load_model(model_dir))
    options = {"max_memory": {"cpu": budget}, "offload_folder": str(tmp_path)}
    model = load_model(model_dir, device_map=device_map, **options)
    assert (model.hf_device_map.get(HEAD) == "disk") is (budget < 2_000_000)
    assert_same(logits(model), expected)
    assert_same(logits(model), expected)


@pytest.mark.regression("tied_weights_on_disk", r"KeyError: 'lm_head.weight'")
def test_head_on_the_disk(model_dir, tmp_path):
    expected = logits(load_model(model_dir))
    options = {"device_map": {HEAD: "disk", "": "cpu"}, "offload_folder": str(tmp_path)}
    model = load_model(model_dir, **options)
    assert_same(logits(model), expected)
    # Without the patch, the model that was dispatched with it stays right.
    with gemma4_compat.disabled("tied_weights_on_disk"):
        assert_same(logits(model), expected)
    assert_same(logits(copy.deepcopy(model)), expected)
    assert inspect_model(model).ok


@pytest.mark.parametrize(
    "device_map",
    [
        {HEAD: "disk", EMBEDDINGS: "disk", "": "cpu"},
        {HEAD: "disk", EMBEDDINGS: "disk", "model.language_model.layers.1": "disk", "": "cpu"},
        within(2_500_000),
    ],
    ids=["both", "and a layer", "inferred"],
)
def test_loaded_by_accelerate(model_dir, device_map, tmp_path):
    expected = logits(loaded(model_dir, tmp_path, {"": "cpu"}))
    model = loaded(model_dir, tmp_path / "offload", device_map)
    assert model.lm_head.weight.is_meta
    assert_same(logits(model), expected)
    assert_same(logits(model), expected)
    model.save_pretrained(tmp_path / "saved")
    assert_same(logits(load_model(tmp_path / "saved")), logits(load_model(model_dir)))


#: In these releases, accelerate takes all weights on meta for tied to each other.
BY_ADDRESS = pytest.mark.regression("tied_weights_on_disk", r"another weight stands in")


@(BY_ADDRESS if holds("accelerate<1.15") else pytest.mark.each_stack)
def test_weights_of_one_shape(tmp_path):
    """Where shapes agree, the first weight stands in for the others, without an error."""
    from accelerate import dispatch_model
    from accelerate.utils import offload_state_dict

    torch.manual_seed(0)
    names = ("table", "one", "two", "head")
    model = torch.nn.Sequential()
    for name in names:
        model.add_module(name, torch.nn.Linear(4, 4, bias=False))
    model.head.weight = model.table.weight
    model.add_module("here", torch.nn.Linear(4, 4))
    expected = model(torch.eye(4)).detach()
    offload_state_dict(tmp_path, model.state_dict())
    for name in names[:-1]:
        module = model.get_submodule(name)
        module.weight = torch.nn.Parameter(module.weight.to("meta"))
    model.head.weight = model.table.weight
    dispatch_model(model, {**dict.fromkeys(names, "disk"), "here": "cpu"}, offload_dir=tmp_path)
    assert torch.equal(model(torch.eye(4)), expected), "another weight stands in for one"
