"""The loader for DeepSpeed ZeRO-3 loads buffers.  Without DeepSpeed, it loads nothing else."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from gemma4_compat.engine.gate import holds
from tests.support import load_model


@pytest.mark.regression("zero_loaded_buffers", "layer_scalar")
@pytest.mark.parametrize("prefixed", [True, False])
def test_buffers_of_a_checkpoint(model_dir, prefixed):
    from transformers.integrations import deepspeed

    if holds("transformers>=5.6"):
        pytest.skip("this release loads the buffers under DeepSpeed only")
    (file,) = model_dir.glob("*.safetensors")
    state = load_file(file)
    if not prefixed:
        state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    model = load_model(model_dir)
    expected = {name: each.clone() for name, each in model.named_buffers()}
    loaded = {n for n in expected if n in state or n.removeprefix("model.") in state}
    assert any(name.endswith("layer_scalar") for name in loaded)
    for name, each in model.named_buffers():
        each.add_(1) if name in loaded else None
    errors, missing = deepspeed._load_state_dict_into_zero3_model(model, state)
    assert not errors
    for name, each in model.named_buffers():
        assert torch.equal(each, expected[name]), name
    assert not missing & loaded
