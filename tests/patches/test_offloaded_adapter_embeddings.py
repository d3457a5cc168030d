"""Embeddings are saved to and loaded from an adapter's file if the model offloads them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.patches.test_offloaded_save import whole_cpu, whole_disk
from tests.support import assert_same, load_model, logits, split

EMBEDDINGS = "model.language_model.embed_tokens"
MAPS = {
    "embed_tokens": {EMBEDDINGS: "disk", "": "cpu"},
    "lm_head": {"lm_head": "disk", "": "cpu"},
}


def adapted(model, target):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=[target], init_lora_weights=False)
    return get_peft_model(model, config).eval()


def offload(model_dir, folder, target):
    model = split(load_model(model_dir), folder, MAPS[target])
    logits(model, ("text",))  # the placement of tied weights changes with the first forward
    return model


REGRESSION = pytest.mark.regression(
    "offloaded_adapter_embeddings", r"Cannot copy out of meta tensor"
)


# With embed_tokens offloaded, a forward needs offloaded_pad_embedding.
@pytest.mark.parametrize("target", [pytest.param("lm_head", marks=REGRESSION), "embed_tokens"])
def test_saved_files_are_those_of_the_whole_model(model_dir, target, tmp_path):
    adapted(load_model(model_dir), target).save_pretrained(tmp_path / "one")
    model = adapted(offload(model_dir, tmp_path / "offload", target), target)
    model.save_pretrained(tmp_path / "split")
    one, found = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "split")
    )
    assert any("base_layer" in name for name in one)
    assert found.keys() == one.keys()
    assert all(torch.equal(found[name], one[name]) for name in one)


def test_embeddings_of_the_file_are_used(model_dir, tmp_path):
    """The embeddings in the file differ from those of the model that loads the adapter."""
    from peft import PeftModel

    other = load_model(model_dir)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.5)
    adapted(other, "embed_tokens").save_pretrained(tmp_path / "adapter")
    one = load_model(model_dir)
    # In a split model, only the embeddings are overwritten, not the head that is tied to them.
    one.lm_head.weight = torch.nn.Parameter(one.lm_head.weight.detach().clone())
    one = PeftModel.from_pretrained(one, tmp_path / "adapter").eval()
    model = offload(model_dir, tmp_path / "offload", "embed_tokens")
    model = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    for _ in range(2):
        assert_same(logits(model), logits(one))


@pytest.mark.parametrize("load", ["PEFT", "transformers"])
@pytest.mark.parametrize("offload", [whole_cpu, whole_disk])
def test_the_head_follows_the_embeddings_of_the_file(model_dir, tmp_path, offload, load):
    """Both are one tensor; on the disk, each has a copy."""
    from peft import PeftModel

    def changed():
        model = load_model(model_dir)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.5)
        return model

    def loaded(model):
        if load == "PEFT":
            return PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
        model.load_adapter(tmp_path / "adapter")
        return model

    adapted(changed(), "embed_tokens").save_pretrained(tmp_path / "adapter")
    model = loaded(offload(load_model(model_dir), tmp_path / "offload"))
    expected = logits(loaded(changed()))
    for _ in range(2):
        assert_same(logits(model), expected)


@pytest.mark.parametrize("target", ["embed_tokens", "embed_tokens_per_layer"])
def test_forward_and_training_step(model_dir, target, tmp_path):
    def gradients(model):
        inputs = {"input_ids": torch.arange(3, 15)[None]}
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    one = adapted(load_model(model_dir), target)
    device_map = {f"model.language_model.{target}": "disk", "": "cpu"}
    model = split(load_model(model_dir), tmp_path, device_map)
    logits(model, ("text",))
    model = adapted(model, target)
    for _ in range(2):
        assert_same(logits(model), logits(one))
    expected, found = gradients(one), gradients(model)
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
