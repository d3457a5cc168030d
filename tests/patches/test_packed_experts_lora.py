"""LoRA through PEFT's target_parameters on experts in 4 bits.

The reference is LoRA on the same model with the weights that bitsandbytes dequantizes.  The update
is added to the same weights by the same operations, so outputs and gradients are equal bit for bit.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref

import pytest
import torch
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gemma4_compat
from gemma4_compat.runtime.experts.lent import Lent
from gemma4_compat.runtime.experts.packed import is_packed
from tests import support
from tests.patches.test_fused_experts_4bit import (
    FUSED,
    SIZES,
    assert_near,
    dequantized,
    experts_of,
    load,
    logits,
)

peft = pytest.importorskip("peft")

TARGETS = [f"experts.{name}" for name in FUSED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    support.save_random("Gemma4 experts", path, **SIZES)
    return path


def config(**options):
    options = {"r": 4, "target_modules": [], "target_parameters": TARGETS, **options}
    return peft.LoraConfig(**options)


def plain(model):
    """The model with dequantized experts."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.experts = dequantized(layer.experts)
        layer.experts.config = model.config
    return model


def randomize(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in support.adapter_parameters(model).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def adapted(base, **options):
    return randomize(peft.get_peft_model(base, config(**options)))


def gradients(model, implementation="grouped_mm"):
    model.get_base_model().set_experts_implementation(implementation)
    model.zero_grad()
    ids = torch.arange(3, 15)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in support.adapter_parameters(model).items()}


@pytest.mark.regression("packed_experts_lora", "the experts are not in 4 bits")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_training(folder, implementation):
    base = load(folder)
    assert is_packed(experts_of(base).down_proj), "the experts are not in 4 bits"
    try:
        expected = gradients(adapted(plain(base)), implementation)
    except RuntimeError as error:
        if implementation != "batched_mm" or "modified by an inplace operation" not in str(error):
            raise
        pytest.skip("this release cannot train unquantized experts with batched_mm (5.8, 5.9)")
    found = gradients(adapted(base), implementation)
    assert found.keys() == expected.keys()
    if implementation == "batched_mm":  # which copies the weights of an expert for each token
        for name, gradient in found.items():
            assert_near(gradient, expected[name], 2**-6)
        return
    for name, gradient in found.items():
        assert gradient.abs().max() > 0
        assert torch.equal(gradient, expected[name]), name


def test_without_the_patch(folder):
    """What the users of experts in 4 bits would see: the tests above need both patches."""
    error = "may not change the dtype of the tensor|matrix, got Byte"
    raised = pytest.raises((ValueError, RuntimeError), match=error)
    with gemma4_compat.disabled("packed_experts_lora"), raised:
        logits(adapted(load(folder)))


def test_a_step_with_checkpointing(folder):
    model = adapted(load(folder))
    model.train()
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    found = gradients(model)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


@pytest.mark.skipif(Version(peft.__version__) < Version("0.21"), reason="PEFT has no factors")
def test_what_autograd_keeps(folder):
    """Not the sum of a weight and its update, nor anything else of the weight's size."""
    base, sizes = load(folder), []
    smallest = experts_of(base).down_proj.quant_state.shape.numel()
    model = adapted(base)

    def keep(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = gradients(model)
        assert len(sizes) > 100
        assert max(sizes) < smallest
    assert all(map(torch.equal, found.values(), gradients(model).values()))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("targets", [{}, {"target_parameters": None, "target_modules": ["q_proj"]}])
def test_checkpoints_drop_offloaded_experts(folder, tmp_path, targets, implementation):
    from tests.patches.test_checkpointed_4bit_offload import packed_weights

    expected = gradients(adapted(load(folder), **targets).train(), implementation)
    device_map = {"": "cpu", **{f"model.layers.{index}": "disk" for index in range(3)}}
    model = adapted(support.split(load(folder), tmp_path, device_map), **targets).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.get_base_model().set_experts_implementation(implementation)
    ids, before = torch.arange(3, 15)[None], packed_weights()
    loss = model(input_ids=ids, labels=ids).loss
    assert packed_weights() <= before
    loss.backward()
    for name, parameter in support.adapter_parameters(model).items():
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("trained", [False, True])
def test_an_adapter_that_changes_before_the_backward(folder, trained):
    """As plain PEFT: an error if it is trained, else the gradients of the forward."""

    def step(base):
        model = randomize(peft.get_peft_model(base, config(), autocast_adapter_dtype=False))
        model.get_base_model().set_experts_implementation("grouped_mm")
        parameters = support.adapter_parameters(model).values()
        for parameter in parameters:
            parameter.requires_grad_(trained)
        ids = torch.arange(3, 15)[None]
        inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=inputs, labels=ids).loss
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(3)
        loss.backward()
        return inputs.grad

    base = load(folder)
    models = plain(base), base
    if trained:
        for each in models:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step(each)
    else:
        expected, found = map(step, models)
        assert torch.equal(found, expected)


def test_a_gate_of_a_user_reads_dequantized_weights(folder):
    base, seen = load(folder), []
    kind = type(experts_of(base))

    class Own(kind):
        def _apply_gate(self, gate_up):
            seen.append(self.down_proj.detach().float().square().mean().item())
            return super()._apply_gate(gate_up)

    models = plain(base), base
    for model in models:
        for layer in model.model.layers:
            layer.experts.__class__ = Own
        logits(model, 1), logits(model, 40)
    assert len(seen) == 12
    assert seen[:6] == seen[6:]


def test_nothing_is_freed_that_a_mode_keeps(folder):
    model, kept = adapted(load(folder)), []

    class Keep(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            kept.extend(each for each in tree_leaves(output) if isinstance(each, torch.Tensor))
            return output

    with Keep():
        logits(model, 40)
    assert all(each.untyped_storage().nbytes() for each in kept if each.numel())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("targets", [{}, {"target_parameters": None, "target_modules": ["q_proj"]}])
def test_one_dequantized_weight_at_a_time(folder, monkeypatch, targets, checkpointing):
    """In the forward and in the backward.  Nothing keeps another tensor until it is collected."""
    if not targets and Version(peft.__version__) < Version("0.21"):
        pytest.skip("PEFT has no factors")
    from gemma4_compat.runtime.experts.packed import Packed

    model, made, original = adapted(load(folder), **targets).train(), [], Packed.whole
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()

    def whole(self, number=None):
        alive = [weight for each in made if (weight := each()) is not None]
        assert not any(weight.untyped_storage().nbytes() for weight in alive)
        weight = original(self, number)
        made.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(Packed, "whole", whole)
    gc.disable()
    try:
        before = weakref.WeakSet(each for each in gc.get_objects() if type(each) is Lent)
        gradients(model)
        assert not [each for each in gc.get_objects() if type(each) is Lent and each not in before]
    finally:
        gc.enable()
    assert len(made) > 10


@pytest.mark.skipif(Version(peft.__version__) < Version("0.21"), reason="PEFT has no factors")
def test_few_tokens_get_the_updates_of_their_experts(tmp_path, monkeypatch):
    from gemma4_compat.runtime.experts.packed import Packed

    support.save_random("Gemma4 experts", tmp_path, **SIZES, num_experts=16)
    model = adapted(load(tmp_path))
    expected = logits(adapted(plain(load(tmp_path))), 1)
    with monkeypatch.context() as patch:
        patch.delattr(Packed, "whole")  # which dequantizes all experts
        assert_near(logits(model, 1), expected, 3 * 2**-7)
    with model.disable_adapter():
        assert not torch.equal(logits(model, 1), expected)


def test_prepared_for_training(folder):
    model = peft.prepare_model_for_kbit_training(load(folder))
    assert is_packed(experts_of(model).down_proj)
    found = gradients(adapted(model))
    assert all(
        gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in found.values()
    )


def test_threads(folder):
    """Each thread adds its own updates, and afterwards the adapter can be switched off."""
    model = adapted(load(folder))
    expected = [logits(model, tokens) for tokens in (5, 9, 40)]
    with model.disable_adapter():
        base = logits(model, 9)
    wrong = []

    def work(number):
        for turn in range(6):
            found = logits(model, (5, 9, 40)[(number + turn) % 3])
            if not torch.equal(found, expected[(number + turn) % 3]):
                wrong.append((number, turn))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
    with model.disable_adapter():
        assert torch.equal(logits(model, 9), base)


def test_outputs(folder):
    base = load(folder)
    expected, model = adapted(plain(base)), adapted(base)
    for tokens in (1, 7, 40):
        assert torch.equal(logits(model, tokens), logits(expected, tokens))
        with model.disable_adapter(), expected.disable_adapter():
            near = 3 * 2**-7 if tokens == 1 else 0
            assert_near(logits(model, tokens), logits(expected, tokens), near)
    model.eval()
    assert not torch.equal(logits(model), logits(load(folder)))


@pytest.mark.parametrize("offloaded", [False, True])
def test_modules_to_save(folder, tmp_path, offloaded):
    """PEFT trains a copy of the experts, which is not in 4 bits, as without the package."""
    base = load(folder)
    options = {"target_modules": ["q_proj"], "target_parameters": None}
    options["modules_to_save"] = ["experts"]
    expected = peft.get_peft_model(plain(base), config(**options))
    if offloaded:
        support.split(base, tmp_path / "disk", {"": "cpu", "model.layers.1.experts": "disk"})
    model = peft.get_peft_model(base, config(**options))
    ids = torch.arange(3, 15)[None]
    for each in (model, expected):
        randomize(each)
        each(input_ids=ids, labels=ids).loss.backward()
    found, wanted = (
        {name: p.grad for name, p in each.named_parameters() if p.requires_grad}
        for each in (model, expected)
    )
    assert any("experts" in name for name in found)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert_near(gradient, wanted[name], 0.02)  # other layers are in 4 bits in one model alone
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model.eval()))


def test_save_and_load(folder, tmp_path):
    """An adapter has the same tensor names as one of a model in bfloat16, and loads over either."""
    from safetensors.torch import load_file

    base = load(folder)
    model, other = adapted(base), adapted(load(folder, None))
    model.save_pretrained(tmp_path / "four")
    other.save_pretrained(tmp_path / "sixteen")
    names = [
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("four", "sixteen")
    ]
    assert names[0].keys() == names[1].keys()
    assert {t.shape for t in names[0].values()} == {t.shape for t in names[1].values()}
    for name in ("four", "sixteen"):
        again = peft.PeftModel.from_pretrained(load(folder), tmp_path / name)
        assert torch.equal(logits(again), logits(model))


def test_two_adapters(folder):
    base = load(folder)
    models = [adapted(plain(base)), adapted(base)]
    if Version(peft.__version__) < Version("0.20"):  # refuses them, whatever the weights are
        for model in models:
            with pytest.raises(ValueError, match="only one LoRA adapter"):
                model.add_adapter("second", config(r=8))
        return
    for model in models:
        model.add_adapter("second", config(r=8))
        randomize(model, seed=1)
        model.base_model.set_adapter(["default", "second"])
    assert torch.equal(logits(models[0]), logits(models[1]))
    both = logits(models[0])
    for model in models:
        model.set_adapter("second")
    assert torch.equal(logits(models[0]), logits(models[1]))
    assert not torch.equal(logits(models[0]), both)


def test_merging(folder):
    """The sum is quantized again, as in 4-bit layers: within the step between two values."""
    base = load(folder)
    expected, model = adapted(plain(base)).merge_and_unload(), adapted(copy.deepcopy(base))

    def weights(model):
        layers = (experts_of(model, layer) for layer in range(3))
        modules = (getattr(each, "get_base_layer", lambda each=each: each)() for each in layers)
        return [getattr(dequantized(m), name).data for m in modules for name in FUSED]

    model.merge_adapter()
    merged = weights(model.get_base_model())
    model.unmerge_adapter()
    unmerged = weights(model.get_base_model())
    for layer in range(3):
        for name in FUSED:
            wanted = getattr(experts_of(expected, layer), name).data
            assert_near(merged.pop(0), wanted, 0.11)
    for found, before in zip(unmerged, weights(base), strict=True):
        assert_near(found, before, 0.2)
    model = model.merge_and_unload()
    assert is_packed(experts_of(model).down_proj)
    assert not torch.equal(logits(model), logits(base))


def test_merge_into_the_unquantized_base(folder, tmp_path):
    """An adapter that was trained over 4-bit experts, merged by the command."""
    from gemma4_compat.merging import merge

    adapted(load(folder)).save_pretrained(tmp_path / "adapter")
    expected = peft.PeftModel.from_pretrained(load(folder, None), tmp_path / "adapter")
    expected = logits(expected.merge_and_unload())
    merge(folder, tmp_path / "adapter", tmp_path / "merged")
    found = load(tmp_path / "merged", None)
    assert torch.equal(logits(found), expected)
    assert not torch.equal(expected, logits(load(folder, None)))
    assert is_packed(experts_of(load(tmp_path / "merged")).down_proj)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}])
def test_refusals_stay(folder, options):
    with pytest.raises(ValueError, match="ParamWrapper does not work with"):
        peft.get_peft_model(load(folder), config(**options))
