"""``load_checkpoint_and_dispatch`` loads all tensors of modules on the disk."""

from __future__ import annotations

import pytest
import torch

from tests.support import assert_same, logits


def loaded(model_dir, folder, device_map, **options):
    """The model, loaded by accelerate and not by transformers."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, Gemma4ForConditionalGeneration

    with init_empty_weights():
        model = Gemma4ForConditionalGeneration(AutoConfig.from_pretrained(model_dir))
    model.tie_weights()
    return load_checkpoint_and_dispatch(
        model,
        str(model_dir),
        device_map=device_map(model) if callable(device_map) else device_map,
        offload_folder=str(folder),
        dtype=torch.bfloat16,
        skip_keys=model._skip_keys_device_placement,
        **options,
    ).eval()


def apart(*disk):
    """A device map without an entry for "": these modules are on the disk, all else is not."""

    def entries(model, name=""):
        if name in disk or not any(each.startswith(f"{name}.") or not name for each in disk):
            return {name: "disk" if name in disk else "cpu"}
        own = [n for n, _ in (*model._parameters.items(), *model._buffers.items())]
        found = {f"{name}.{each}": "cpu" for each in own}
        for child, module in model.named_children():
            found |= entries(module, f"{name}.{child}" if name else child)
        return found

    return entries


@pytest.mark.regression("disk_buffers", r"logits differ by up to")
@pytest.mark.parametrize(
    "disk",
    [
        ("model.language_model.layers.1",),
        ("model.vision_tower", "model.audio_tower"),
        ("model.language_model.layers.0", "model.language_model.layers.3.mlp"),
    ],
    ids=["layer", "towers", "parts"],
)
def test_outputs_are_those_of_one_device(model_dir, disk, tmp_path):
    expected = logits(loaded(model_dir, tmp_path, {"": "cpu"}))
    model = loaded(model_dir, tmp_path / "offload", apart(*disk))
    assert_same(logits(model), expected)
    assert_same(logits(model), expected)


@pytest.mark.parametrize("disk", ["model.language_model.layers.1", "model.vision_tower"])
def test_buffers_that_are_offloaded_stay_offloaded(model_dir, disk, tmp_path):
    expected = logits(loaded(model_dir, tmp_path, {"": "cpu"}))
    model = loaded(model_dir, tmp_path / "offload", apart(disk), offload_buffers=True)
    assert all(tensor.is_meta for tensor in model.get_submodule(disk).state_dict().values())
    assert_same(logits(model), expected)


def test_whole_map_on_the_disk(model_dir, tmp_path):
    """accelerate's loader took the disk for a device of safetensors."""
    from accelerate.utils import load_checkpoint_in_model
    from transformers import AutoConfig, Gemma4ForConditionalGeneration

    with torch.device("meta"):
        model = Gemma4ForConditionalGeneration(AutoConfig.from_pretrained(model_dir))
    load_checkpoint_in_model(model, str(model_dir), {"": "disk"}, offload_folder=str(tmp_path))
    assert model.model.language_model.layers[1].layer_scalar.item() != 1
