"""An entry ``layers.1`` of a device map does not apply to ``layers.10``."""

from __future__ import annotations

import pytest
import torch

from tests.support import assert_same, load_model, logits, offloaded

NO_VALUE = r"we need a `value` to put in on cpu"


def deep(folder):
    """Save a Llama of twelve layers, so that it has ``layers.1`` and ``layers.10``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=12,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM


# The misplaced module has no entry of its own, so the bug of root_device_map comes first.
@pytest.mark.regression("device_map_prefix", NO_VALUE, behind="root_device_map")
def test_layer_1_without_layer_10(tmp_path):
    model_class, ids = deep(tmp_path / "model"), torch.arange(8)[None]
    model = model_class.from_pretrained(
        tmp_path / "model",
        device_map={"model.layers.1": "disk", "": "cpu"},
        offload_folder=tmp_path / "offload",
    )
    assert {".".join(name.split(".")[:3]) for name in offloaded(model)} == {"model.layers.1"}
    with torch.no_grad():
        expected = model_class.from_pretrained(tmp_path / "model")(ids).logits
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.regression("device_map_prefix", NO_VALUE, behind="root_device_map")
def test_embeddings_without_per_layer_embeddings(model_dir, tmp_path):
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(
        model_dir,
        device_map={"model.language_model.embed_tokens": "disk", "lm_head": "disk", "": "cpu"},
        dtype=torch.bfloat16,
        offload_folder=tmp_path,
    )
    tied = {"model.language_model.embed_tokens.weight", "lm_head.weight"}
    assert offloaded(model) <= tied
    assert_same(logits(model), logits(load_model(model_dir)))


CASES = {
    "longest": ({"a": 0, "a.b": 1, "": 2}, {"a.b.c": 1, "a.bc": 0, "ab": 2, "d": 2}),
    "tensor": ({"a.weight": 0, "a": 1}, {"a.weight": 0, "a.bias": 1}),
    "no root": ({"a": 0}, {"a.b": 0, "ab": "cpu"}),
    "root": ({"": 3}, {"a.b": 3}),
}


@pytest.mark.regression("device_map_prefix", r"takes others along")
def test_placed_as_accelerate_does():
    from transformers.integrations.accelerate import expand_device_map

    found = {n: expand_device_map(entries, list(due)) for n, (entries, due) in CASES.items()}
    assert found == {name: due for name, (_, due) in CASES.items()}, "takes others along"


def test_without_a_map():
    from transformers.integrations.accelerate import expand_device_map

    assert expand_device_map(None, ["a", "b"]) == {"a": "cpu", "b": "cpu"}
