"""Objects of users that look like those which the patches are for."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from gemma4_compat.model.caches import cache_name
from tests.support import load_model, split


class Wrapping(torch.Tensor):
    """As DTensor and torchao's tensors: without memory of its own, and said to be on a GPU."""

    @staticmethod
    def __new__(cls, inner):
        options = {"dtype": inner.dtype, "device": "cuda:0"}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.alias.default):
            return cls(args[0].inner)
        assert function is aten._to_copy.default
        return args[0].inner.clone()


def test_state_that_is_no_tensor_or_has_no_memory():
    """Two tensors without an address are not one."""
    from accelerate.utils import OffloadedWeightsLoader

    given = {"a": Wrapping(torch.zeros(2)), "b": Wrapping(torch.ones(2)), "c": {"step": 3}}
    stored = OffloadedWeightsLoader(state_dict=given).state_dict
    assert stored["a"].tolist() == [0, 0]
    assert stored["b"].tolist() == [1, 1]
    assert stored["c"] == {"step": 3}


def test_shared_kv_states_of_another_layer():
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def forward(self, states, shared_kv_states=None):
            shared_kv_states.append(states)
            return shared_kv_states

    given = []
    assert Layer()(1, shared_kv_states=given) is given == [1]


@pytest.mark.parametrize("name", ["weights", "gate_up_proj"])
def test_experts_of_a_user(name):
    """A class of the same name, with other parameters, or called with keywords."""
    peft = pytest.importorskip("peft")

    class GemmaOwnExperts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter(name, torch.nn.Parameter(torch.ones(2, 3, 3).bfloat16()))

        def forward(self, hidden_states):
            weights = getattr(self, name)
            return hidden_states.to(weights.dtype) @ weights[0]

    model = torch.nn.ModuleDict({"experts": GemmaOwnExperts()})
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert model.experts(hidden_states=torch.ones(1, 3)).tolist() == [[3.0] * 3]


def test_a_mock_in_place_of_a_method_of_a_hook():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    layer = add_hook_to_module(torch.nn.Linear(2, 2), AlignDevicesHook("cpu"))
    expected = layer(torch.ones(1, 2))
    mocked = mock.Mock(side_effect=lambda module, output: output)
    with mock.patch.object(AlignDevicesHook, "post_forward", mocked):
        assert torch.equal(layer(torch.ones(1, 2)), expected)
    assert mocked.called


def test_a_method_of_generation_that_is_replaced_later(monkeypatch):
    from transformers import Gemma4ForConditionalGeneration
    from transformers.generation.utils import GenerationMixin

    monkeypatch.setattr(GenerationMixin, "_prefill", lambda *args, **kwargs: "the user's")
    model = Gemma4ForConditionalGeneration.__new__(Gemma4ForConditionalGeneration)
    config = SimpleNamespace(prefill_chunk_size=None)
    assert model._prefill(torch.ones((1, 2), dtype=torch.long), config, {}) == "the user's"


def test_a_method_of_generation_gets_the_model_itself(model_dir, tmp_path, monkeypatch):
    """captured_decoding keeps the model that it gets; its first parameter is offloaded."""
    from transformers import StaticCache

    from gemma4_compat.patches.generation import captured_decoding

    tied = ("model.language_model.embed_tokens", "lm_head")
    model = split(load_model(model_dir), tmp_path, {**dict.fromkeys(tied, "disk"), "": "cpu"})
    assert model.get_input_embeddings().weight.is_meta
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=8)
    assert model._valid_auto_compile_criteria({cache_name(): cache}, model.generation_config)
    assert captured_decoding._call.decoder.model is model
    assert model.hf_device_map[""] == "cpu"
