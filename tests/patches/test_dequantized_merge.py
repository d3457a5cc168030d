"""Adapters can be merged after dequantize() of their model."""

from __future__ import annotations

import copy

import pytest
import torch

import gemma4_compat
from tests.support import assert_same, load_model, logits

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

ERROR = (
    r"'Parameter' object has no attribute 'quant_state'|'Linear' object has no attribute 'state'"
)
MLP = r".*\.language_model\.layers\.\d+\.mlp\.(gate|up|down)_proj"
ATTENTION = r".*\.language_model\.layers\.\d+\.self_attn\.(q|o)_proj"

CONFIGS = {
    "lora": lambda: peft.LoraConfig(target_modules=rf"{MLP}|{ATTENTION}", lora_alpha=16),
    "rslora": lambda: peft.LoraConfig(target_modules=MLP, use_rslora=True),
    "dora": lambda: peft.LoraConfig(target_modules=MLP, use_dora=True),
    "randlora": lambda: peft.RandLoraConfig(target_modules=MLP, r=16),
    "vera": lambda: peft.VeraConfig(target_modules=MLP, r=16),
    "road": lambda: peft.RoadConfig(target_modules=MLP),
    "oft": lambda: peft.OFTConfig(target_modules=MLP, oft_block_size=32, r=0),
    "hira": lambda: peft.HiraConfig(target_modules=MLP, r=8),
    "pvera": lambda: peft.PveraConfig(target_modules=MLP, r=8),
}
# PEFT cannot merge these into quantized weights; without the patch, dequantize does not help.
NEVER_MERGED = {
    "ia3": lambda: peft.IA3Config(target_modules=MLP, feedforward_modules=[]),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=MLP, total_step=10),
}


def adapted(model, tuner, name="default"):
    """Return the model with an adapter whose tensors all have random values."""
    configs = CONFIGS | NEVER_MERGED
    try:
        config = configs[tuner]()
    except AttributeError:
        pytest.skip(f"this PEFT has no {tuner}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if f".{name}" in key and parameter.is_floating_point():
                    parameter.add_(0.05 * torch.randn(parameter.shape).to(parameter))
    return model.eval()


def plain(model_dir, kind, tuner, model):
    """The expected result of dequantize(): an adapter on a base that was dequantized before."""
    base = load_model(model_dir, kind)
    base.dequantize()
    expected = adapted(base, tuner)
    dtypes = {name: tensor.dtype for name, tensor in expected.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dtypes
    # Copy the adapter: PEFT rounds its initial values to bfloat16 if the base weight is bfloat16.
    adapter = {n: t for n, t in model.state_dict().items() if ".base_layer." not in n}
    assert not expected.load_state_dict(adapter, strict=False).unexpected_keys
    return expected


def layers(model):
    return {name: m for name, m in model.named_modules() if hasattr(m, "get_base_layer")}


def assert_close(found, expected, tolerance):
    """Compare the logits by their relative difference, in the 2-norm."""
    for kind, wanted in expected.items():
        relative = ((found[kind] - wanted).norm() / wanted.norm()).item()
        assert relative <= tolerance, f"{kind} logits differ by {relative:.2g}, relatively"


# The merged model differs from the model with the adapter only in the order of rounding to
# bfloat16.  In the unquantized model, merging changes the logits by 0.02.  In 8 bit, activations
# are quantized as well, but not after dequantize.
TOLERANCE = {"nf4": 0.05, "nf4-nested": 0.05, "int8": 0.1}


@pytest.mark.regression("dequantized_merge", ERROR)
@pytest.mark.parametrize("kind", TOLERANCE)
def test_lora(model_dir, kind):
    model = adapted(load_model(model_dir, kind), "lora")
    with_adapter = logits(adapted(load_model(model_dir, kind), "lora"), ["text"])
    model.dequantize()
    expected = plain(model_dir, kind, "lora", model)
    for prepare in (lambda m: copy.deepcopy(m).merge_and_unload(), lambda m: m):
        found = logits(prepare(model))
        assert_same(found, logits(prepare(expected)))
        assert_close({"text": found["text"]}, with_adapter, TOLERANCE[kind])


@pytest.mark.regression("dequantized_merge", ERROR)
@pytest.mark.parametrize("tuner", [name for name in CONFIGS if name != "lora"])
def test_other_tuners(model_dir, tuner):
    kind = "int8" if tuner == "rslora" else "nf4"
    model = adapted(load_model(model_dir, kind), tuner)
    model.dequantize()
    expected = plain(model_dir, kind, tuner, model)
    model.merge_adapter()
    expected.merge_adapter()
    assert_same(logits(model, ["text"]), logits(expected, ["text"]))


@pytest.mark.regression("dequantized_merge", r"NotImplementedError|Cannot merge ia3 layers")
@pytest.mark.parametrize("tuner", NEVER_MERGED)
def test_tuners_that_do_not_merge_into_quantized_weights(model_dir, tuner):
    model = adapted(load_model(model_dir, "nf4"), tuner)
    model.dequantize()
    expected = plain(model_dir, "nf4", tuner, model)
    merged = copy.deepcopy(model).merge_and_unload()
    assert_same(logits(model, ["text"]), logits(expected, ["text"]))
    assert_same(logits(merged, ["text"]), logits(expected.merge_and_unload(), ["text"]))


@pytest.mark.regression("dequantized_merge", ERROR)
def test_merge_unmerge_and_a_second_adapter(model_dir):
    model = adapted(load_model(model_dir, "nf4"), "lora")
    model.base_model.model.dequantize()
    expected = adapted(plain(model_dir, "nf4", "lora", model), "rslora", "second")
    adapted(model, "rslora", "second")
    for names in (["default"], ["second"], ["default", "second"]):
        for each in (model, expected):
            each.base_model.set_adapter(names)
            each.merge_adapter(names)
        assert_same(logits(model, ["text"]), logits(expected, ["text"]))
        for each in (model, expected):
            each.unmerge_adapter()
        assert_same(logits(model, ["text"]), logits(expected, ["text"]))


@pytest.mark.parametrize("tuner", CONFIGS | NEVER_MERGED)
def test_layers_are_those_of_an_unquantized_model(model_dir, tuner):
    expected = layers(adapted(load_model(model_dir), tuner))
    model = adapted(load_model(model_dir, "nf4"), tuner)
    model.dequantize()
    found = layers(model)
    assert found.keys() == expected.keys()
    for name, layer in expected.items():
        assert type(found[name]) is type(layer)
        assert vars(found[name]).keys() == vars(layer).keys()


def test_training_and_copies_after_dequantize(model_dir):
    from gemma4_compat.tiny import text_inputs

    model = adapted(load_model(model_dir, "nf4"), "dora")
    model.dequantize()
    batch = text_inputs(model.config)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert all(gradient is not None and gradient.any() for gradient in trained.values())
    twin = copy.deepcopy(model)
    assert_same(logits(twin.merge_and_unload()), logits(model.merge_and_unload()))


def test_quantized_layers_are_left_alone(model_dir):
    """dequantize() of one model does not change the layers of another model."""
    model = adapted(load_model(model_dir, "nf4"), "lora")
    other = adapted(load_model(model_dir, "nf4"), "lora")
    other.dequantize()
    assert {type(m).__name__ for m in layers(model).values()} == {"Linear4bit"}
    assert model.base_model.model.is_loaded_in_4bit
    assert not hasattr(other.base_model.model, "is_loaded_in_4bit")


def test_uninstalled(model_dir, pristine):
    with gemma4_compat.disabled("dequantized_merge"):
        model = adapted(load_model(model_dir, "nf4"), "lora")
        model.dequantize()
        with pytest.raises(AttributeError, match=ERROR):
            model.merge_and_unload()
