"""A warning says that gradients in float16 overflow.  tests/test_t4.py checks its advice."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from gemma4_compat.patches.training import fp16_training_notice

NAME = fp16_training_notice.__name__
SCALE = 1024.0  # that of the loss, as by GradScaler


@pytest.fixture(scope="module")
def model():
    """A model with small hidden states."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, global_head_dim=32, sliding_window=16,
        num_kv_shared_layers=0, hidden_size_per_layer_input=0, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.weight"):
                parameter.normal_(0, 1 / 8)
            elif name.endswith(("input_layernorm.weight", "pre_feedforward_layernorm.weight")):
                parameter.fill_(4)
        model.lm_head.weight.normal_(0, 0.3)
        model.model.embed_tokens.weight.mul_(1e-3)
        for layer in model.model.layers:
            layer.layer_scalar.fill_(1e-3)
    return model


@pytest.fixture
def notices(caplog):
    fp16_training_notice._warn.cache_clear()
    caplog.set_level(logging.WARNING, logger=NAME)
    yield lambda: [each.getMessage() for each in caplog.records if each.name == NAME]
    fp16_training_notice._warn.cache_clear()


def step(model, dtype, autocast=None):
    """The loss and the gradients of a step of a copy of the model in this dtype."""
    model = copy.deepcopy(model).to(dtype)
    torch.manual_seed(1)
    ids = torch.randint(5, 96, (2, 32))
    with torch.autocast("cpu", autocast or torch.float16, enabled=autocast is not None):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    (loss * SCALE).backward()
    return loss.detach(), {
        name: each.grad.double() / SCALE for name, each in model.named_parameters()
    }


@pytest.mark.regression("fp16_training_notice", r"nan in \d+ of \d+ gradients, and no warning")
def test_gradients_that_overflow(model, notices):
    loss, gradients = step(model, torch.float16)
    assert loss.isfinite()
    bad = sum(not each.isfinite().all() for each in gradients.values())
    assert bad > 10, "this model does not show the bug"
    assert notices(), f"nan in {bad} of {len(gradients)} gradients, and no warning"
    step(model, torch.float16)
    assert len(notices()) == 1, "once for each process"


def test_products_in_float16(model, notices):
    """Where they overflow, bfloat16 weights do not help; without autocast all is finite."""
    large = copy.deepcopy(model)
    for layer in large.model.layers:
        layer.mlp.up_proj.weight.data *= 300
        layer.mlp.gate_proj.weight.data *= 300
    loss, _ = step(large, torch.bfloat16)
    assert loss.isfinite()
    assert not notices()
    loss, gradients = step(large, torch.float32, autocast=torch.float16)
    assert not all(each.isfinite().all() for each in gradients.values())
    assert len(notices()) == 1
    assert "bnb_4bit_compute_dtype=torch.float32" in notices()[0]


@pytest.mark.parametrize("way", ["evaluation", "no gradient", "bfloat16", "frozen"])
def test_no_other_forward_warns(model, notices, way):
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float16
    model = copy.deepcopy(model).to(dtype).train(way != "evaluation")
    model.requires_grad_(way != "frozen")
    ids = torch.arange(5, 37)[None]
    with torch.set_grad_enabled(way != "no gradient"):
        model(input_ids=ids, labels=ids, use_cache=False)
    assert not notices()
