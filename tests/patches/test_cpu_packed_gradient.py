"""A 4-bit layer can be trained after bitsandbytes has repacked its weight for the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support import linear4bit, load_model

functional = pytest.importorskip("bitsandbytes.functional")
if not getattr(functional, "has_avx512bf16", bool)():
    pytest.skip("on this CPU nothing is repacked", allow_module_level=True)


def layer(nested):
    return linear4bit(nested=nested).to("cpu").eval()


def input(**kwargs):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 256, generator=generator).bfloat16().requires_grad_(**kwargs)


def run(module):
    with torch.no_grad():
        module.eval()(input(requires_grad=False))
    assert is_packed(module)


def output_and_gradient(module, x):
    output = module(x)
    output.float().square().sum().backward()
    assert x.grad is not None, "the input's gradient is missing"
    return output.detach(), x.grad


def is_packed(module):
    return getattr(module.weight.quant_state, "packing_format_for_cpu", False)


@pytest.mark.regression(
    "cpu_packed_gradient", "the input's gradient is missing|does not require grad"
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "single"])
def test_gradient_of_the_input(nested, training):
    module, never_run = (layer(nested).train(training) for _ in range(2))
    expected = output_and_gradient(never_run, input())
    run(module)
    for _ in range(2):
        found = output_and_gradient(module.train(training), input())
        assert all(map(torch.equal, found, expected))


def test_evaluation_is_as_before():
    module, x = layer(True), input(requires_grad=False)
    run(module)
    with torch.no_grad():
        expected = module.eval()(x)
        module.train()(x)
        assert not is_packed(module)
        assert torch.equal(module.eval()(x), expected)
    assert is_packed(module)


@pytest.mark.parametrize("copied", [copy.copy, lambda weight: weight.to("cpu")])
def test_a_weight_that_shares_the_quant_state(copied):
    module, other, x = layer(True), layer(True), input(requires_grad=False)
    run(module)
    other.weight = copied(module.weight)
    with torch.no_grad():
        expected = other.eval()(x)
        module.train()(x)
        assert torch.equal(other.eval()(x), expected)
        assert module.quant_state is module.weight.quant_state
        module.eval()(x)
        assert torch.equal(other(x), expected)


def test_evaluation_with_a_trained_leaf_stays_packed():
    """Without autograd the weight stays packed, even if the input requires a gradient."""
    module = layer(True)
    run(module)
    with torch.no_grad():
        module(input())
    assert is_packed(module)


@pytest.mark.regression("cpu_packed_gradient", "gradients are missing|gradients differ")
def test_lora_gradients_after_an_evaluation(model_dir):
    from peft import LoraConfig, get_peft_model

    from gemma4_compat.tiny import text_inputs

    def gradients(*, evaluated):
        config = LoraConfig(target_modules=r".*\.language_model\..*\.mlp\.(up|down)_proj")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = get_peft_model(load_model(model_dir, "nf4-nested"), config)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.05)
        inputs = text_inputs(model.config)
        if evaluated:
            with torch.no_grad():
                model.eval()(**inputs)
        model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    expected, found = gradients(evaluated=False), gradients(evaluated=True)
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing, f"gradients are missing: {missing}"
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"gradients differ: {different}"


@pytest.mark.regression("cpu_packed_gradient", "the adapter differs from one trained without")
@pytest.mark.parametrize("between", ["evaluate", "generate"])
def test_trainer(between, model_dir, tmp_path):
    """An evaluation or a generation between two steps does not change the trained adapter."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tests.patches.test_gradient_accumulation import adapted, rows

    class Generates(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            prompt = rows()[1]["input_ids"][None]
            model.eval().generate(input_ids=prompt, max_new_tokens=2, do_sample=False)

    def trained(between=None):
        model = adapted(load_model(model_dir, "nf4-nested"))
        evaluates = {"eval_strategy": "steps", "eval_steps": 1} if between == "evaluate" else {}
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=True,
            **evaluates,
        )
        Trainer(
            model=model,
            args=arguments,
            train_dataset=rows(),
            eval_dataset=rows(),
            callbacks=[Generates()] if between == "generate" else [],
        ).train()
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    expected, found = trained(), trained(between)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"the adapter differs from one trained without: {different}"
