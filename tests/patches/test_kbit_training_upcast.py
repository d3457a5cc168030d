"""prepare_model_for_kbit_training does not cast per-layer embeddings and fused experts."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

import gemma4_compat
from tests.support import NOT_PACKED, quantization, save_random

PATCH = "kbit_training_upcast"
CAST = r"cast to torch.float32"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function that returns the folder of a family's checkpoint in bfloat16."""
    found = {}

    def folder(family):
        if family not in found:
            found[family] = tmp_path_factory.mktemp("model")
            save_random(family, found[family])
        return found[family]

    return folder


def load(folder, kind="nf4"):
    from transformers import AutoModelForCausalLM

    options = {} if kind is None else {
        "quantization_config": quantization(kind, llm_int8_skip_modules=NOT_PACKED)
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": "cpu"}, **options
    )
    if kind is not None:
        assert "Linear4bit" in {type(module).__name__ for module in model.modules()}
    return model


def prepare(model, **options):
    # The import is that of a user's script; prepared_as_upstream calls this without the patch.
    from peft import prepare_model_for_kbit_training

    options.setdefault("use_gradient_checkpointing", False)
    return prepare_model_for_kbit_training(model, **options)


def prepared_as_upstream(model, **options):
    with gemma4_compat.disabled(PATCH):
        return prepare(model, **options)


def giants(model):
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if "embed_tokens_per_layer" in name or ".experts." in name
    }


def assert_left_alone(model, before):
    found = giants(model)
    assert found
    assert found.keys() == before.keys()
    for name, parameter in found.items():
        was = before[name]
        assert parameter.dtype == was.dtype, f"{name} was cast to {parameter.dtype}"
        assert parameter.data_ptr() == was.data_ptr(), f"{name} was copied"
        assert not parameter.requires_grad


def pinned(model):
    """Tensors that share memory with the parameters of ``giants``."""
    return {name: parameter.detach() for name, parameter in giants(model).items()}


@pytest.mark.regression("kbit_training_upcast", CAST)
@pytest.mark.parametrize("kind", ["nf4", None], ids=["nf4", "bf16"])
@pytest.mark.parametrize("family", ["Gemma4", "Gemma4 experts", "Gemma3n"])
def test_giants_are_left_alone(folders, family, kind, pristine):
    model = load(folders(family), kind)
    before = pinned(model)
    assert prepare(model) is model
    assert_left_alone(model, before)


@pytest.mark.regression("kbit_training_upcast", CAST)
def test_inside_an_adapter_model(folders):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "embed_tokens_per_layer"]
    model = get_peft_model(load(folders("Gemma4")), LoraConfig(r=4, target_modules=targets))
    before = {n: p.detach() for n, p in giants(model).items() if "lora_" not in n}
    prepare(model)
    found = {n: p for n, p in giants(model).items() if "lora_" not in n}
    assert [p.dtype for p in found.values()] == [torch.bfloat16], "was cast to torch.float32"
    assert [p.data_ptr() for p in found.values()] == [p.data_ptr() for p in before.values()]
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.regression("kbit_training_upcast", CAST)
def test_offloaded_table(folders, tmp_path):
    from accelerate import dispatch_model

    expected = prepared_as_upstream(load(folders("Gemma4"), None))
    model = dispatch_model(
        load(folders("Gemma4"), None),
        {"model.embed_tokens_per_layer": "disk", "": "cpu"},
        main_device="cpu", offload_dir=str(tmp_path),
        skip_keys=["past_key_values", "shared_kv_states"],
    )  # fmt: skip
    prepare(model)
    table = model.model.embed_tokens_per_layer.weight
    assert table.is_meta
    assert table.dtype == torch.bfloat16, f"was cast to {table.dtype}"
    for _ in range(2):
        assert_same_training(trained(model, steps=0), trained(expected, steps=0))


@pytest.mark.parametrize("family", ["Gemma4", "Gemma4 experts", "Gemma3n", "Llama"])
def test_everything_else_as_upstream(folders, family, pristine):
    def described(model):
        return {
            name: (parameter.dtype, parameter.requires_grad, type(parameter))
            for name, parameter in model.named_parameters()
        }

    found = prepare(load(folders(family)), use_gradient_checkpointing=True)
    expected = prepared_as_upstream(load(folders(family)), use_gradient_checkpointing=True)
    special = giants(found).keys()
    assert bool(special) is (family != "Llama")
    for name, description in described(expected).items():
        if name not in special:
            assert described(found)[name] == description, name
    assert found.is_gradient_checkpointing
    assert "parameters" not in vars(found)
    if family == "Llama":
        assert hooks_of(found) == hooks_of(expected)


def hooks_of(model):
    return {
        name: (len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    }


# -- outputs ---------------------------------------------------------------------------------------


def adapted(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = r".*layers\.\d+\.(mlp\.\w+_proj|self_attn\.[qo]_proj)"
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def trained(model, steps=3, autocast=False, rate=1e-2):
    """Train for a few steps; return the losses, and the logits and the adapter afterwards."""
    tokens = torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    losses = []

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input_ids=tokens, labels=tokens, use_cache=False)

    if steps:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = step().loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        output = step()
    adapter = {n: p.detach() for n, p in model.named_parameters() if "lora_" in n}
    return losses, output.logits.float(), adapter


def assert_same_training(found, expected):
    assert found[0] == expected[0]
    worst = (found[1] - expected[1]).abs().max().item()
    assert found[1].isfinite().all()
    assert worst == 0, f"logits differ by up to {worst:.3g}"
    assert found[2].keys() == expected[2].keys()
    assert [n for n, p in found[2].items() if not torch.equal(p, expected[2][n])] == []


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("kind", ["nf4", None], ids=["nf4", "bf16"])
@pytest.mark.parametrize("family", ["Gemma4", "Gemma3n"])
def test_training_with_per_layer_embeddings(folders, family, kind, autocast, pristine):
    """Results are equal: rows times a power of two are exact in bfloat16; the rest is float32."""
    options = {"use_gradient_checkpointing": True}
    options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    model = adapted(prepare(load(folders(family), kind), **options))
    expected = adapted(prepared_as_upstream(load(folders(family), kind), **options))
    before = pinned(model)
    expected, found = trained(expected, autocast=autocast), trained(model, autocast=autocast)
    assert len(set(expected[0])) == 3
    assert_same_training(found, expected)
    assert_left_alone(model, before)


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])


@IMPLEMENTATIONS
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_experts(folders, autocast, implementation, pristine):
    """The experts multiply in bfloat16, as the 4-bit layers do: four roundings of 2**-9.

    Under autocast, float32 experts also multiply in bfloat16, except with grouped_mm.
    """
    states = torch.randn(10, 128, generator=torch.Generator().manual_seed(0))
    index = torch.arange(20).reshape(10, 2)
    weights = torch.linspace(0.1, 0.9, 20).reshape(10, 2)

    def output(prepare):
        model = prepare(load(folders("Gemma4 experts"), None))
        model.set_experts_implementation(implementation)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model.model.layers[0].experts(states, index, weights).float()

    found, expected = output(prepare), output(prepared_as_upstream)
    off = ((found - expected).norm() / expected.norm()).item()
    exact = autocast and implementation != "grouped_mm"
    assert off <= (0 if exact else 2**-7), f"experts' outputs differ by {off:.3g} of their size"


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_training_with_experts(folders, autocast, pristine):
    """The logits differ from those of upstream's float32 experts no more than before preparing."""
    tokens = {"input_ids": torch.arange(1, 25).reshape(2, 12)}
    as_loaded = load(folders("Gemma4 experts"))
    model = adapted(prepare(load(folders("Gemma4 experts"))))
    expected = prepared_as_upstream(load(folders("Gemma4 experts")))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted = expected(**tokens).logits.float()
        with model.disable_adapter():
            off = (model(**tokens).logits.float() - wanted).norm()
        assert off <= (as_loaded(**tokens).logits.float() - wanted).norm()
    losses, logits, adapter = trained(model, autocast=autocast)
    assert len(set(losses)) == 3
    assert torch.tensor(losses).isfinite().all()
    assert logits.isfinite().all()
    assert all(parameter.isfinite().all() for parameter in adapter.values())


@pytest.mark.parametrize("name", ["embed_tokens_per_layer", "experts"])
def test_trained_copies_are_as_upstream(folders, name, pristine):
    from peft import LoraConfig, get_peft_model

    def made(prepared):
        model = prepared(load(folders("Gemma4 experts" if name == "experts" else "Gemma4"), None))
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=[name]))

    model, expected = made(prepare), made(prepared_as_upstream)
    trainable = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    assert any(name in each for each in trainable)
    assert trainable == {n: p.dtype for n, p in expected.named_parameters() if p.requires_grad}
    assert_same_training(trained(model), trained(expected))


@pytest.mark.parametrize("name", ["embed_tokens_per_layer.weight", "layers.1.experts.down_proj"])
def test_what_is_unfrozen_is_trained_as_upstream(folders, name, pristine):
    """An update of 1e-5 is lost in bfloat16; the optimizer is made before the first forward."""
    family = "Gemma4 experts" if "experts" in name else "Gemma4"
    weights, changed = [], []
    for prepared in (prepare, prepared_as_upstream):
        model = prepared(load(folders(family), None))
        weight = model.model.get_parameter(name).requires_grad_(True)
        before = weight.detach().float().clone()
        trained(model, rate=1e-5)
        weights.append(weight)
        changed.append((weight.detach() != before).float().mean().item())
    assert weights[0].dtype == torch.float32
    # The experts of the other layers are frozen, and compute in bfloat16.
    assert changed[1] > 0.1
    assert changed[0] == pytest.approx(changed[1], rel=0.05)
    assert "experts" in name or torch.equal(*weights)


def test_in_a_process_group_it_is_said(folders, caplog, monkeypatch, pristine):
    """DDP may have buckets of the old dtype."""
    if gemma4_compat.status()[PATCH].state.value != "applied":
        pytest.skip("upstream casts")
    model = prepare(load(folders("Gemma4"), None))
    weight = model.model.embed_tokens_per_layer.weight.requires_grad_(True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for _ in range(2):
        model(input_ids=torch.arange(3, 9)[None])
    assert weight.dtype == torch.bfloat16
    assert caplog.text.count("are trained in torch.bfloat16") == 1


def test_said_once(folders, caplog, pristine):
    model = load(folders("Gemma4"))
    with caplog.at_level(logging.INFO, logger="gemma4_compat.patches"):
        prepare(model)
    applied = gemma4_compat.status()[PATCH].state.value == "applied"
    said = [r for r in caplog.records if r.name.endswith(PATCH)]
    assert [record.levelname for record in said] == ["INFO"] * applied
    size = 128 * 6 * 256 * 2
    assert all(f"saves {size / 2**30:.3g} GiB" in record.getMessage() for record in said)


def test_twice_and_copied(folders, pristine):
    model = prepare(prepare(load(folders("Gemma4"), None)))
    table = model.model.embed_tokens_per_layer
    assert len(table._forward_hooks) <= 1
    twin = copy.deepcopy(model)
    assert_same_training(trained(twin, 0), trained(model, 0))


def test_errors_leave_the_model_as_it_was(folders, pristine):
    model = load(folders("Gemma4"), None)
    with pytest.raises(TypeError):
        prepare(model, no_such_option=1)
    assert "parameters" not in vars(model)
    assert "embed_tokens_per_layer.weight" in "".join(n for n, _ in model.named_parameters())
