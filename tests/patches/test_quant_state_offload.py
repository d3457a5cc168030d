"""A 4-bit weight keeps its quant state when it is moved to meta and back."""

from __future__ import annotations

import copy
import pickle

import accelerate.hooks  # noqa: F401  (the patch is applied after this import)
import pytest
import torch
from torch import nn

import gemma4_compat
from tests.support import (
    assert_same,
    linear4bit,
    load_model,
    logits,
    offloaded,
    pretend_avx512_bf16,
    split,
)

NESTED = pytest.mark.parametrize("nested", [True, False], ids=["nested", "single"])
LOST = r"Tensor\.item\(\) cannot be called on meta tensors|Cannot copy out of meta tensor; no data!"


def network(nested):
    """Two 4-bit layers, 128 -> 256 -> 128, quantized on the CPU."""
    first, last = (
        linear4bit(128, 256, nested, bias=True),
        linear4bit(256, 128, nested, 1, bias=True),
    )
    return nn.Sequential(first, nn.GELU(), last).to("cpu").eval()


def batch(n=3):
    return torch.randn(n, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)


def to_cpu(model, folder):
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def to_disk(model, folder):
    from accelerate import disk_offload

    return disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def mapped(model, folder):
    from accelerate import dispatch_model

    return dispatch_model(
        model, {"0": "disk", "1": "cpu", "2": "cpu"}, main_device="cpu", offload_dir=str(folder)
    )


OFFLOAD = pytest.mark.parametrize("offload", [to_cpu, to_disk, mapped])


def tensors(state):
    found = {"absmax": state.absmax, "code": state.code}
    if state.nested:
        found |= {"offset": state.offset}
        found |= {"absmax2": state.state2.absmax, "code2": state.state2.code}
    return found


@pytest.mark.regression("quant_state_offload", LOST)
@NESTED
def test_weight_going_to_meta_spares_the_original(nested):
    module = linear4bit(128, 64, nested, bias=True).to("cpu")
    before = {name: tensor.clone() for name, tensor in tensors(module.weight.quant_state).items()}
    gone = module.weight.to("meta")
    assert gone.is_meta
    assert {k: v.cpu() for k, v in module.state_dict().items()}
    for name, tensor in tensors(module.weight.quant_state).items():
        assert torch.equal(tensor, before[name]), name
    for name, tensor in tensors(gone.quant_state).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.regression("quant_state_offload", LOST)
@NESTED
@OFFLOAD
def test_offloaded_output_is_equal_on_every_forward(nested, offload, tmp_path):
    x = batch()
    with torch.no_grad():
        expected = network(nested)(x)
        model = offload(network(nested), tmp_path)
        assert model[0].weight.is_meta
        for _ in range(3):  # repacking for AVX512-BF16 has an effect from the second on
            assert torch.equal(model(x), expected)


@NESTED
@OFFLOAD
def test_detached_and_dispatched_again(nested, offload, tmp_path):
    from accelerate.hooks import remove_hook_from_submodules

    x = batch()
    with torch.no_grad():
        expected = network(nested)(x)
        model = network(nested)
        for turn in range(2):
            offload(model, tmp_path / str(turn))
            assert torch.equal(model(x), expected)
            remove_hook_from_submodules(model)
            assert torch.equal(model(x), expected)


@NESTED
@OFFLOAD
def test_state_dict_of_an_offloaded_model_has_real_quant_states(nested, offload, tmp_path):
    expected = network(nested).state_dict()
    model = offload(network(nested), tmp_path)
    with torch.no_grad():
        model(batch())
    found = model.state_dict()
    assert found.keys() == expected.keys()
    checked = 0
    for key in expected:
        layer, _, part = key.partition(".weight.")
        # Other layers are skipped: bitsandbytes may change the dtype of their quant state.
        if part and model.get_submodule(layer).weight.is_meta:
            assert torch.equal(found[key], expected[key]), key
            checked += 1
    assert checked


@NESTED
def test_host_copy_is_made_once(nested, tmp_path):
    model = to_cpu(network(nested), tmp_path)
    state = model[0].weight.quant_state
    held = {name: (id(tensor), tensor.clone()) for name, tensor in tensors(state).items()}
    with torch.no_grad():
        for _ in range(3):
            model(batch())
    assert model[0].weight.quant_state is state
    assert model[0].quant_state is state, "the module's own reference would hold device memory"
    for name, tensor in tensors(state).items():
        assert (id(tensor), True) == (held[name][0], torch.equal(tensor, held[name][1])), name


@NESTED
def test_backward_through_offloaded_layers(nested, tmp_path):
    def gradient(model):
        x = batch().requires_grad_()
        model(x).float().square().sum().backward()
        return x.grad

    expected = gradient(network(nested).train())
    model = to_disk(network(nested).train(), tmp_path)
    assert torch.equal(gradient(model), expected)
    assert torch.equal(gradient(model), expected)


@NESTED
def test_copies_of_an_offloaded_layer(nested, tmp_path):
    x = batch()
    module = linear4bit(128, 64, nested, bias=True).to("cpu").eval()
    expected = copy.deepcopy(module)(x)
    value, gone = module.weight.data.clone(), module.weight.to("meta")
    state = pickle.loads(pickle.dumps(gone.quant_state))
    for quant_state in (state, copy.deepcopy(gone.quant_state), copy.copy(gone.quant_state)):
        back = type(gone)(value, quant_state=quant_state, bnb_quantized=True, quant_type="nf4")
        module.weight = back.to("cpu")
        assert torch.equal(module(x), expected)


def test_lost_values_are_named_not_invented(tmp_path):
    import gemma4_compat

    model = network(True)
    with gemma4_compat.disabled("quant_state_offload"):
        model[2].weight = model[2].weight.to("meta")
    with pytest.raises(RuntimeError, match=r"quant state of 2 has no values.*Import gemma4_compat"):
        model.state_dict()
    value = torch.zeros(128 * 256 // 2, 1, dtype=torch.uint8)
    weight = type(model[2].weight)(value, quant_state=model[2].weight.quant_state)
    weight.bnb_quantized = True
    with pytest.raises(RuntimeError, match=r"shape \(128, 256\) has no values"):
        weight.to("cpu")
    with pytest.raises(RuntimeError, match=r"quant state of .*2.* has no values|Linear4bit"):
        to_cpu(model, tmp_path)


def test_dtype_only_moves_and_unquantized_weights_are_untouched():
    import bitsandbytes as bnb

    fresh = bnb.nn.Linear4bit(128, 64)
    assert fresh.weight.to("meta").quant_state is None
    weight = linear4bit(128, 64, bias=True).to("cpu").weight
    assert weight.to(torch.uint8).quant_state is weight.quant_state
    assert weight.to("cpu").quant_state is weight.quant_state


@pytest.mark.parametrize("kind", ["nf4-nested", "nf4"])
def test_gemma_with_towers_on_disk(model_dir, kind, tmp_path):
    expected = logits(load_model(model_dir, kind))
    model = split(load_model(model_dir, kind), tmp_path)
    assert any("vision_tower" in name for name in offloaded(model))
    for _ in range(2):
        assert_same(logits(model), expected)


@pytest.mark.parametrize("kind", ["nf4-nested", "nf4"])
def test_gemma_with_decoder_layers_on_disk(model_dir, kind, tmp_path):
    expected = logits(load_model(model_dir, kind))
    layers = {f"model.language_model.layers.{i}": "disk" for i in (1, 2, 4)}
    model = split(load_model(model_dir, kind), tmp_path, {**layers, "": "cpu"})
    for _ in range(3):
        assert_same(logits(model), expected)


@NESTED
@OFFLOAD
@pytest.mark.parametrize("cpu", ["this", "avx512_bf16"])
def test_forwards_while_the_patch_is_off(nested, offload, cpu, tmp_path, caplog, monkeypatch):
    """Its second forward fails, as without the package.  With the patch, the model works again."""
    if cpu == "avx512_bf16":
        pretend_avx512_bf16(monkeypatch)
    model = offload(network(nested), tmp_path)
    expected, saved = model(batch()), model.state_dict()
    with gemma4_compat.disabled("quant_state_offload"):
        assert "Do not run these models" in caplog.text
        with pytest.raises((NotImplementedError, RuntimeError), match=LOST):
            [model(batch()) for _ in range(3)]
    found = model.state_dict()
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert tensor.is_meta or torch.equal(found[name], tensor), name
    assert torch.equal(model(batch()), expected)
    assert torch.equal(model(batch()), expected)
