"""With gradient checkpointing, the projection of the per-layer embeddings keeps no activations."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat import disabled
from gemma4_compat.planning.peak import PeakMemory
from tests.support import load_model

NAME = "ple_training_memory"


@pytest.fixture
def model(model_dir):
    return load_model(model_dir).train()


def text(model):
    return model.model.language_model


def embeddings(model, **options):
    config = model.config.get_text_config()
    torch.manual_seed(0)
    embeds = torch.randn(2, 64, config.hidden_size, dtype=model.dtype, **options)
    per_layer = torch.randn(
        2, 64, config.num_hidden_layers, config.hidden_size_per_layer_input, dtype=model.dtype
    )
    return embeds, per_layer


def enable(model, *, reentrant=False):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()


def kept(model):
    """Bytes that exist after the projection, without its output and its inputs."""
    inputs = embeddings(model, requires_grad=True)
    with PeakMemory(model) as memory:
        output = text(model).project_per_layer_inputs(*inputs)
    return memory.live - output.untyped_storage().nbytes()


@pytest.mark.regression("ple_training_memory", r"the projection keeps \d+ bytes for each value")
def test_what_the_projection_keeps(model):
    enable(model)
    values = embeddings(model)[1].numel()
    number = kept(model) // values
    assert number == 0, f"the projection keeps {number} bytes for each value"


def unused(*args):
    pytest.fail("checkpointed")


def step(model):
    """The loss and the gradients of the decoder."""
    model.zero_grad()
    ids = torch.arange(5, 69).view(2, 32)
    inputs = {"input_ids": ids, "labels": ids, "mm_token_type_ids": torch.zeros_like(ids)}
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    named = text(model).named_parameters()
    return loss.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


@pytest.mark.parametrize("kind", [None, "nf4-nested"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_step_has_the_same_bits(model_dir, kind, reentrant):
    model = load_model(model_dir, kind).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    enable(model, reentrant=reentrant)
    loss, gradients = step(model)
    assert "per_layer_projection_norm.weight" in gradients
    with disabled(NAME):
        other, others = step(model)
    assert torch.equal(loss, other)
    assert gradients.keys() == others.keys()
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("names", [(NAME,), ("pipeline_device",)])
def test_a_weight_that_changes_before_backward(model, names, reentrant):
    """PyTorch's error, with and without the patch."""
    enable(model, reentrant=reentrant)
    inputs = embeddings(model, requires_grad=True)
    with disabled(*names):
        output = text(model).project_per_layer_inputs(*inputs)
    with torch.no_grad():
        text(model).per_layer_model_projection.weight.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    "case", ["no checkpointing", "evaluation", "frozen", "no gradient", "a hook", "own forward"]
)
def test_where_nothing_is_computed_again(model, monkeypatch, case):
    if case != "no checkpointing":
        enable(model)
        monkeypatch.setattr(text(model), "_gradient_checkpointing_func", unused)
    if case == "a hook":
        text(model).per_layer_projection_norm.register_forward_hook(lambda *args: None)
    if case == "own forward":
        projection = text(model).per_layer_model_projection
        projection.forward = type(projection).forward.__get__(projection)
    model.train(case != "evaluation")
    embeds, per_layer = embeddings(model, requires_grad=case not in ("frozen", "no gradient"))
    with torch.set_grad_enabled(case != "no gradient"):
        output = text(model).project_per_layer_inputs(embeds, per_layer)
    assert output.shape == per_layer.shape


def test_a_flag_without_a_function(model):
    """As some programs set it."""
    text(model).gradient_checkpointing = True
    embeds, per_layer = embeddings(model, requires_grad=True)
    assert text(model).project_per_layer_inputs(embeds, per_layer).requires_grad
