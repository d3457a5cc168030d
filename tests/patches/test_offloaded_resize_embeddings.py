"""resize_token_embeddings works on a model with offloaded embeddings."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.model.hooks import offload_hooks
from tests.support import assert_same, load_model, logits, offloaded, split

LANGUAGE = "model.language_model"
ENDS = {
    "embed_tokens": (f"{LANGUAGE}.embed_tokens",),
    "per layer": (f"{LANGUAGE}.embed_tokens_per_layer",),
    "lm_head": ("lm_head",),
    "both": (f"{LANGUAGE}.embed_tokens", "lm_head"),
}


def resized(model, size):
    torch.manual_seed(0)  # the rows of new tokens are random
    model.resize_token_embeddings(size)
    return model


@pytest.mark.regression("offloaded_resize_embeddings", r"Trying to set a tensor of shape|meta")
@pytest.mark.parametrize("size", [505, 520], ids=["smaller", "larger"])
@pytest.mark.parametrize("ends", list(ENDS))
def test_logits_are_those_of_the_whole_model(model_dir, ends, size, tmp_path):
    one = resized(load_model(model_dir), size)
    if ends == "per layer" and one.get_submodule(*ENDS[ends]).num_embeddings != size:
        pytest.skip("this release does not resize per-layer embeddings")
    expected = logits(one, ("text",))
    device_map = {**dict.fromkeys(ENDS[ends], "disk"), "": "cpu"}
    model = split(load_model(model_dir), tmp_path / "offload", device_map)
    logits(model, ("text",))  # the placement of tied weights changes with the first forward
    before = offloaded(model)
    model = resized(model, size)
    for _ in range(2):
        found = logits(model, ("text",))
        assert found["text"].shape[-1] == size
        assert_same(found, expected)
    assert offloaded(model) == before
    model.save_pretrained(tmp_path / "saved")
    assert_same(logits(load_model(tmp_path / "saved"), ("text",)), expected)


@pytest.mark.parametrize("ends", list(ENDS))
def test_ends_that_are_tied_again(model_dir, ends, tmp_path):
    expected = logits(load_model(model_dir), ("text",))
    device_map = {**dict.fromkeys(ENDS[ends], "disk"), "": "cpu"}
    model = split(load_model(model_dir), tmp_path / "offload", device_map)
    logits(model, ("text",))  # before the first forward, the ends are one tensor
    before = offloaded(model)
    model.tie_weights()
    assert offloaded(model) == before
    for _ in range(2):
        assert_same(logits(model, ("text",)), expected)


def test_the_address_of_the_old_weight(model_dir, tmp_path):
    """accelerate looks tied weights up by their address, and free memory is used again."""
    parts = {f"{LANGUAGE}.layers.1": "disk", "": "cpu"}
    model = split(load_model(model_dir), tmp_path, parts)
    logits(model, ("text",))
    address = model.get_input_embeddings().weight.data_ptr()
    tables = [hook.tied_params_map for hook in offload_hooks(model.modules())]
    assert any(address in table for table in tables)
    resized(model, 520)
    assert not any(address in table for table in tables)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_tensor_without_an_address(model_dir, tmp_path, is_split):
    model = load_model(model_dir)
    if is_split:
        model = split(model, tmp_path, {f"{LANGUAGE}.layers.1": "disk", "": "cpu"})
    model.register_buffer("users", torch.eye(2).to_sparse(), persistent=False)
    assert resized(model, 520).get_input_embeddings().num_embeddings == 520


def test_an_adapter_after_a_resize(model_dir, language_adapter_dir, tmp_path):
    """PEFT and accelerate ask the hooks where the weights were before the dispatch."""
    from accelerate.hooks import remove_hook_from_submodules
    from peft import PeftModel

    one = PeftModel.from_pretrained(resized(load_model(model_dir), 520), language_adapter_dir)
    expected = logits(one, ("text",))
    parts = {f"{LANGUAGE}.layers.1": "disk", **dict.fromkeys(ENDS["per layer"], "disk"), "": "cpu"}
    model = resized(split(load_model(model_dir), tmp_path, parts), 520)
    adapted = PeftModel.from_pretrained(model, language_adapter_dir)
    assert_same(logits(adapted, ("text",)), expected)
    remove_hook_from_submodules(adapted.get_base_model())
    assert not any(weight.is_meta for weight in adapted.parameters())
    assert_same(logits(adapted, ("text",)), expected)


def test_new_tokens_of_another_model(llama_dir, tmp_path):
    """The rows of added tokens are looked up in the new offloaded weight."""
    from accelerate import dispatch_model
    from transformers import LlamaForCausalLM

    ids = torch.tensor([[1, 255, 259, 256]])
    one = resized(LlamaForCausalLM.from_pretrained(llama_dir).eval(), 260)
    model = dispatch_model(
        LlamaForCausalLM.from_pretrained(llama_dir).eval(),
        {"model.embed_tokens": "disk", "": "cpu"},
        main_device="cpu",
        offload_dir=str(tmp_path),
    )
    model = resized(model, 260)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(ids).logits, one(ids).logits)


def test_resize_that_fails_changes_nothing(model_dir, tmp_path):
    expected = logits(load_model(model_dir), ("text",))
    model = split(load_model(model_dir), tmp_path, {f"{LANGUAGE}.embed_tokens": "disk", "": "cpu"})
    logits(model, ("text",))
    before = offloaded(model)
    with pytest.raises(ValueError, match="not and integer"):
        model.resize_token_embeddings(520, pad_to_multiple_of=0.5)
    assert offloaded(model) == before
    assert_same(logits(model, ("text",)), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("ends", ["embed_tokens", "per layer"])
def test_on_a_gpu(model_dir, ends):
    one = resized(load_model(model_dir, None, {"": 0}), 520)
    model = load_model(model_dir, None, {**dict.fromkeys(ENDS[ends], "cpu"), "": 0})
    model = resized(model, 520)
    for _ in range(2):
        assert_same(logits(model, ("text",)), logits(one, ("text",)))
