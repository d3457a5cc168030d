"""A checkpoint drops offloaded 4-bit weights; losses and gradients stay as they are."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointError, checkpoint

import gemma4_compat
from gemma4_compat.model.quant_state import HOST
from gemma4_compat.runtime.host import blocks
from gemma4_compat.tiny import BROAD_TARGETS, text_inputs
from tests.support import (
    adapter_parameters,
    linear4bit,
    load_model,
    split,
    with_layers_on_the_cpu,
)

pytest.importorskip("bitsandbytes")
LAYERS = {f"model.language_model.layers.{index}": "disk" for index in range(1, 5)}


def adapted(model, checkpointing=False):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=BROAD_TARGETS, init_lora_weights=False)
    model = get_peft_model(model, config).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    return model


def loss_of(model):
    device = gemma4_compat.input_device(model)
    batch = {name: each.to(device) for name, each in text_inputs(model.config).items()}
    return model(**batch, labels=batch["input_ids"], use_cache=False).loss


def step(model, *, twice=False):
    """The loss and the gradients."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward(retain_graph=twice)
    if twice:
        loss.backward()
    return [loss.detach(), *gradients(model)]


def gradients(model):
    """Those of the decoder's adapter; the towers are not used."""
    found = [p.grad for p in adapter_parameters(model).values() if p.grad is not None]
    assert len(found) > 40
    return [gradient.clone() for gradient in found]


def tensors():
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return [each for each in found if not each.is_meta]


def packed_weights():
    """The storages of all 4-bit weights that Python's objects hold."""
    packed = [each for each in tensors() if each.dtype == torch.uint8 and each.shape[1:] == (1,)]
    return {each.untyped_storage()._cdata for each in packed}


def copied_blocks():
    """The number of copies of offloaded layers' blocks of which Python's objects hold a part."""
    dispatches = blocks.dispatches.values()
    hosts = [each.host for of in dispatches for each in of.layers.values() if each.host is not None]
    assert hosts
    storages = {each.untyped_storage() for each in tensors()}
    sizes = {host.nbytes for host in hosts}
    own = {host.untyped_storage()._cdata for host in hosts}
    return len({s._cdata for s in storages if s.nbytes() in sizes and s._cdata not in own})


@pytest.mark.regression("checkpointed_4bit_offload", "stay until the backward")
@pytest.mark.parametrize("nested", [False, True])
def test_copies_of_weights(nested):
    """Of layers that get a copy of their weight for each forward, as an offload hook makes it."""
    import accelerate.hooks  # noqa: F401 - with it the patch is applied

    layers = [linear4bit(128, 128, nested, seed).to("cpu") for seed in range(3)]
    hosts = [layer.weight for layer in layers]
    for host in hosts:
        setattr(host.quant_state, HOST, copy.copy(host.quant_state))

    def run(number, hidden):
        layers[number].weight = copy.deepcopy(hosts[number])
        output = layers[number](hidden)
        layers[number].weight = hosts[number]
        return output

    inputs = torch.randn(4, 128, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.nn.Sequential(*layers)(inputs).sum(), inputs)
    before, hidden = packed_weights(), inputs
    for number in range(3):
        hidden = checkpoint(run, number, hidden, use_reentrant=False)
    held = packed_weights() - before
    assert len(held) == 0, f"{len(held)} copies stay until the backward"
    hidden.sum().backward()
    assert torch.equal(inputs.grad, expected)


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_weights_are_dropped(model_dir, tmp_path, kind):
    model = adapted(split(load_model(model_dir, kind), tmp_path, {**LAYERS, "": "cpu"}))
    before = packed_weights()
    loss = loss_of(model)
    held = packed_weights() - before
    assert len(held) == 0
    loss.backward()


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_blocks_are_dropped(model_dir, monkeypatch, kind):
    """The tensors of a layer that is copied in one block are views of it."""
    from accelerate import cpu_offload

    expected = step(adapted(load_model(model_dir, kind)))
    monkeypatch.setattr(blocks, "STREAMED_TO", ("cpu",))
    model = cpu_offload(load_model(model_dir, kind), execution_device=torch.device("cpu"))
    model = adapted(model)
    loss = loss_of(model)
    assert copied_blocks() == 0
    loss.backward()
    assert copied_blocks() == 0
    assert all(map(torch.equal, [loss, *gradients(model)], expected))


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_gradients(model_dir, tmp_path, kind, checkpointing):
    expected = step(adapted(load_model(model_dir, kind), checkpointing))
    model = split(load_model(model_dir, kind), tmp_path, {**LAYERS, "": "cpu"})
    model = adapted(model, checkpointing)
    for _ in range(2):
        assert all(map(torch.equal, step(model), expected))
    if checkpointing is not None:
        return
    with save_on_cpu():
        assert all(map(torch.equal, step(model), expected))
    twice = step(model, twice=True)
    assert all(torch.equal(a, 2 * b) for a, b in zip(twice[1:], expected[1:], strict=True))
    with gemma4_compat.disabled("checkpointed_4bit_offload"):
        loss = loss_of(model)
    model.zero_grad()
    loss.backward()  # of a forward without the patch
    assert all(map(torch.equal, gradients(model), expected[1:]))


def test_uninstalled_before_the_backward(model_dir, tmp_path):
    """The backward of a forward with the patch raises an error without it."""
    model = adapted(split(load_model(model_dir, "nf4"), tmp_path, {**LAYERS, "": "cpu"}))
    loss, errors = loss_of(model), (TypeError, CheckpointError)
    with gemma4_compat.disabled("checkpointed_4bit_offload"), pytest.raises(errors):
        loss.backward()


@pytest.mark.cuda
@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_and_gradients_on_a_gpu(model_dir, checkpointing):
    expected = step(adapted(load_model(model_dir, "nf4", {"": 0}), checkpointing))
    model = adapted(with_layers_on_the_cpu(load_model(model_dir, "nf4", {"": 0})), checkpointing)
    assert all(map(torch.equal, step(model), expected))
    loss_of(model)
    assert copied_blocks() == 0
