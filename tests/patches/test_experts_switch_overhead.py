"""A model without experts does not walk its modules for each token, to switch their experts."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from packaging.version import Version

from gemma4_compat.patches.legacy import experts_switch_overhead as patch
from tests import support
from tests.patches.test_captured_decoding import assert_same, generated, prompt

WALKS = r"all modules were walked \d+ times for 4 tokens"
#: Later releases switch once for all tokens.
EACH_TOKEN = Version(transformers.__version__) < Version("5.14")


@pytest.fixture
def walks(monkeypatch):
    """What the experts are switched to.  For the code that switches them, models are on a GPU."""
    from transformers import PreTrainedModel

    seen, original = [], PreTrainedModel.set_experts_implementation

    def counting(self, name):
        seen.append(name)
        return original(self, name)

    def device(self):
        switches = sys._getframe(1).f_code.co_name == "_optimize_model_for_decode"
        return torch.device("cuda" if switches else "cpu")

    monkeypatch.setattr(PreTrainedModel, "set_experts_implementation", counting)
    monkeypatch.setattr(PreTrainedModel, "device", property(device))
    return seen


def generate(model):
    model.config._experts_implementation_internal = "grouped_mm"
    ids = torch.tensor([[5, 6, 7]])
    return model.generate(input_ids=ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)


@pytest.mark.regression("experts_switch_overhead", WALKS)
def test_a_model_without_experts(model_dir, walks):
    generate(support.load_model(model_dir))
    assert len(walks) <= 2, f"all modules were walked {len(walks)} times for 4 tokens"


def test_experts_switch(moe_dir, walks):
    model = transformers.Gemma4ForCausalLM.from_pretrained(moe_dir)
    generate(model)
    assert len(walks) == (8 if EACH_TOKEN else 2)
    assert model.config._experts_implementation == "grouped_mm"


def test_an_attached_model_switches(model_dir, moe_dir, walks):
    model = support.load_model(model_dir)
    model.draft = transformers.Gemma4ForCausalLM.from_pretrained(moe_dir)
    generate(model)
    assert len(walks) == (8 if EACH_TOKEN else 2)


def test_other_models(llama_dir, monkeypatch):
    """Some have several text models, and transformers cannot say which is meant."""
    model = transformers.LlamaForCausalLM.from_pretrained(llama_dir)

    def several(self, *args, **kwargs):
        raise ValueError("Multiple valid text configs were found")

    monkeypatch.setattr(type(model.config), "get_text_config", several)
    with model._optimize_model_for_decode():
        pass


def test_a_release_that_switches_once(monkeypatch):
    from transformers.generation.utils import GenerationMixin

    def once(self):
        return self.get_experts_implementation()

    monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", once)
    assert patch.PATCH.probe_function().verdict.name == "FIXED"


@pytest.mark.cuda
@pytest.mark.regression("experts_switch_overhead", r"all modules were walked")
def test_tokens_on_a_gpu(model_dir, monkeypatch):
    model, seen = support.load_model(model_dir, None, {"": 0}), []
    inputs = prompt(model)
    expected = generated(model, inputs, eager=True)
    original = type(model).set_experts_implementation

    def counting(self, name):
        seen.append(name)
        return original(self, name)

    monkeypatch.setattr(type(model), "set_experts_implementation", counting)
    assert_same(generated(model, inputs, eager=True), expected)
    assert len(seen) <= 2, f"all modules were walked {len(seen)} times"
