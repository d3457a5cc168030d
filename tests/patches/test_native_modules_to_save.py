"""transformers' own load_adapter loads modules_to_save and trainable tokens."""

from __future__ import annotations

import pytest
import torch

from tests.patches.test_offloaded_modules_to_save import build, offload, trained
from tests.support import assert_same, load_model, logits

pytestmark = pytest.mark.usefixtures("native_loading")


def values(model, parts=("modules_to_save.", "trainable_tokens_delta")):
    return {
        name.removeprefix("base_model.model."): parameter.detach().clone()
        for name, parameter in trained(model).items()
        if any(part in name for part in parts)
    }


@pytest.mark.regression("native_modules_to_save", r"[1-9]\d* of \d+ tensors were not loaded")
@pytest.mark.parametrize("name", ["norm", "tokens"])
def test_every_tensor_is_loaded(model_dir, name, tmp_path):
    expected = values(build(model_dir, tmp_path / "adapter", name))
    model = load_model(model_dir)
    model.load_adapter(str(tmp_path / "adapter"))
    found = values(model)
    assert found.keys() == expected.keys()
    # load_adapter keeps an adapter in the dtype of the base model.
    wrong = [n for n, v in found.items() if not torch.equal(v, expected[n].to(v.dtype))]
    assert not wrong, f"{len(wrong)} of {len(found)} tensors were not loaded"


@pytest.mark.parametrize("name", ["up_proj", "embedding_projection", "embed_tokens", "tokens"])
def test_split_model_gives_the_whole_models_logits(model_dir, name, tmp_path):
    """``up_proj`` is also the name of clipped layers in the towers."""
    adapted = build(model_dir, tmp_path / "adapter", name)
    one = load_model(model_dir)
    one.load_adapter(str(tmp_path / "adapter"))
    model = offload(model_dir, tmp_path / "offload", name)
    logits(model)
    model.load_adapter(str(tmp_path / "adapter"), adapter_name="other")
    for each, adapter in ((one, "default"), (model, "other")):
        found = {n.replace(f".{adapter}", ".default"): v for n, v in values(each).items()}
        expected = values(adapted)
        assert found.keys() == expected.keys()
        assert all(torch.equal(v, expected[n].to(v.dtype)) for n, v in found.items())
    for _ in range(2):
        assert_same(logits(model.eval()), logits(one.eval()))
