"""A model works if its token embeddings are on another device than its inputs.

Without a GPU, "meta" is the second device.  It computes no values, but like CUDA it requires that
the tensors of an operation are on one device.
"""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import TOWERS, image_inputs, text_inputs
from tests.support import assert_same, load_model, logits

BIDIRECTIONAL = pytest.mark.parametrize("bidirectional", [None, "vision"])


@pytest.fixture
def directed_dir(model_dir, tmp_path, bidirectional):
    """The checkpoint with the attention of the small (causal) or the large Gemma 4 models."""
    import json
    import shutil

    path = shutil.copytree(model_dir, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = bidirectional
    (path / "config.json").write_text(json.dumps(config))
    return path


def on_two_devices(model, first, second):
    """Add the hooks of ``dispatch_model``, which itself rejects the device "meta"."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    class Placed(AlignDevicesHook):
        def init_hook(self, module):
            return module

    skip_keys = model._skip_keys_device_placement
    model.model.language_model.to(second)
    model.lm_head.to(second)
    for name, module in model.named_modules():
        device = second if name.startswith(("model.language_model", "lm_head")) else first
        if name in ("", "model") or module.state_dict():
            device = first if name in ("", "model") else device
            add_hook_to_module(module, Placed(execution_device=device, skip_keys=skip_keys))
    return model


@BIDIRECTIONAL
@pytest.mark.regression("ple_mask_device", r"is not on the expected device")
def test_embeddings_on_a_second_device(directed_dir, bidirectional):
    model = on_two_devices(load_model(directed_dir), "cpu", "meta")
    inputs = text_inputs(model.config)
    # The model looks for padding in the values of this mask, and meta has no values.
    del inputs["attention_mask"]
    inputs["position_ids"] = torch.arange(12)[None]
    if bidirectional is None:
        assert model(**inputs).logits.shape == (1, 12, 512)
        return
    seen = []
    model.model.language_model.register_forward_pre_hook(
        lambda *given: seen.append(given[2]), with_kwargs=True
    )
    model(**inputs)
    masks = seen[0]["attention_mask"]
    assert {mask.device.type for mask in masks.values() if mask is not None} == {"meta"}


@BIDIRECTIONAL
def test_one_device_is_as_ever(directed_dir, bidirectional):
    expected = logits(load_model(directed_dir))
    assert_same(logits(on_two_devices(load_model(directed_dir), "cpu", "cpu")), expected)


@BIDIRECTIONAL
@pytest.mark.regression("ple_mask_device", r"tensors to be on the same device")
@pytest.mark.cuda(gpus=2)
def test_language_model_on_the_second_gpu(directed_dir, bidirectional):
    towers = dict.fromkeys((*TOWERS, "model.embed_vision", "model.embed_audio"), 0)
    device_map = {**towers, "model.language_model": 1, "lm_head": 1}
    expected = logits(load_model(directed_dir, device_map={"": 0}), ("text", "image"))
    model = load_model(directed_dir, device_map=device_map)
    found = {}
    with torch.no_grad():
        for kind, make in (("text", text_inputs), ("image", image_inputs)):
            inputs = {key: value.to(0) for key, value in make(model.config).items()}
            found[kind] = model(**inputs).logits.float().cpu()
    assert_same(found, expected)
