"""A model can be loaded with all its modules on disk."""

from __future__ import annotations

import accelerate
import pytest
import torch
import transformers
from packaging.version import Version

from tests.conftest import WITHOUT
from tests.support import assert_same, load_model, logits, offloaded

NO_WEIGHTS = r"token embeddings of this \w+ are on the meta device"
REFUSED = r"trying to offload the whole model to the disk"
DISK = {"": "disk"}
NEW = Version(transformers.__version__) >= Version("5.13") and Version(
    accelerate.__version__
) >= Version("1.15")


@pytest.fixture(autouse=True)
def _bug(request):
    """The gate cannot say that one of two libraries must be old."""
    if WITHOUT and NEW and not request.config.getoption("matrix"):
        pytest.skip("the bug is not in these versions")


def on_disk(model_dir, folder, device_map=None):
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(
        model_dir, device_map=device_map or DISK, dtype=torch.bfloat16, offload_folder=folder
    )


@pytest.mark.regression("disk_only_map", f"{NO_WEIGHTS}|{REFUSED}", then="offloaded_pad_embedding")
@pytest.mark.parametrize("device_map", [DISK, {"model": "disk", "lm_head": "disk"}])
def test_loaded(model_dir, tmp_path, device_map):
    expected = logits(load_model(model_dir))
    model = on_disk(model_dir, tmp_path, device_map)
    names = {name for name, _ in model.named_parameters()}
    assert_same(logits(model), expected)
    assert offloaded(model) >= names
    assert_same(logits(model), expected)
    assert not model.training
    assert model.hf_device_map == device_map
    assert "_disk_offload_index" not in vars(model)


def test_generate(model_dir, tmp_path):
    ids = torch.tensor([[2, 17, 33, 121]])
    found = on_disk(model_dir, tmp_path).generate(ids, max_new_tokens=6)
    assert torch.equal(found, load_model(model_dir).generate(ids, max_new_tokens=6))


@pytest.mark.regression("disk_only_map", f"{NO_WEIGHTS}|{REFUSED}", then="offloaded_pad_embedding")
def test_saved(model_dir, tmp_path):
    model = on_disk(model_dir, tmp_path / "offload")
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    assert_same(logits(load_model(tmp_path / "saved")), expected)


def test_other_maps(model_dir):
    model = load_model(model_dir, device_map={"": "cpu"})
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
