"""The token embeddings of a model with per-layer embeddings can be offloaded."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import text_inputs
from tests.support import assert_same, load_model, logits

ON_META = r"Tensor on device meta is not on the expected device|Cannot copy out of meta"


def dispatched(model, folder, device_map, main_device="cpu"):
    from accelerate import dispatch_model

    return dispatch_model(
        model,
        device_map,
        main_device=main_device,
        offload_dir=str(folder),
        skip_keys=model._skip_keys_device_placement,
    )


@pytest.mark.regression("offloaded_pad_embedding", ON_META)
@pytest.mark.parametrize("kind", [None, "nf4"])
def test_embedding_on_disk(model_dir, tmp_path, kind):
    expected = logits(load_model(model_dir, kind))
    model = load_model(model_dir, kind)
    model = dispatched(model, tmp_path, {"model.language_model.embed_tokens": "disk", "": "cpu"})
    embedding = model.model.language_model.embed_tokens
    for _ in range(2):
        assert_same(logits(model), expected)
        assert embedding.weight.is_meta


@pytest.mark.regression("offloaded_pad_embedding", ON_META)
@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_whole_model_offloaded(model_dir, tmp_path, offload):
    import accelerate

    expected = logits(load_model(model_dir))
    model = load_model(model_dir)
    if offload == "cpu_offload":
        accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)
    else:
        accelerate.disk_offload(model, tmp_path, execution_device="cpu", offload_buffers=True)
    for _ in range(2):
        assert_same(logits(model), expected)


@pytest.mark.regression("offloaded_pad_embedding", ON_META)
def test_generate(model_dir, tmp_path):
    inputs = text_inputs(load_model(model_dir).config)
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = load_model(model_dir).generate(**inputs, **options)
    device_map = {"model.language_model.embed_tokens": "disk", "": "cpu"}
    model = dispatched(load_model(model_dir), tmp_path, device_map)
    assert torch.equal(model.generate(**inputs, **options), expected)


@pytest.mark.cuda
@pytest.mark.regression(
    "offloaded_pad_embedding", r"on meta|device meta|not on the expected device"
)
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_embedding_off_the_gpu(model_dir, tmp_path, where):
    expected = logits(load_model(model_dir, None, {"": 0}))
    device_map = {"model.language_model.embed_tokens": where, "": 0}
    model = dispatched(load_model(model_dir), tmp_path, device_map, main_device=0)
    for _ in range(2):
        assert_same(logits(model), expected)
