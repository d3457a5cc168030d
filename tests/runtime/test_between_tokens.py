"""What a user's code changes between two tokens of one call counts from the next token on."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from tests.pretended_gpu import pretend
from tests.support import load_model

TOKENS, AT = 8, 4
CHANGES = {}


def change(function):
    CHANGES[function.__name__] = function
    return function


def layers_of(model):
    return model.get_submodule("model.language_model.layers")


def lora_layers(model):
    from peft.tuners.lora import LoraLayer

    return [each for each in layers_of(model).modules() if isinstance(each, LoraLayer)]


def flipped(x):
    return x.flip(-1)


@change
def scaling_of_attention(model, patch):
    for layer in layers_of(model):
        patch.setattr(layer.self_attn, "scaling", 0.01)


@change
def scaling_of_one_layer(model, patch):
    patch.setattr(layers_of(model)[2].self_attn, "scaling", 40.0)


@change
def soft_cap(model, patch):
    patch.setattr(model.config.get_text_config(), "final_logit_softcapping", 0.01)


@change
def activation(model, patch):
    patch.setitem(layers_of(model)[1].mlp._modules, "act_fn", torch.nn.ReLU())


@change
def module(model, patch):
    patch.setitem(layers_of(model)[1]._modules, "mlp", torch.nn.Tanh())


@change
def forward_of_an_instance(model, patch):
    patch.setitem(vars(layers_of(model)[1].mlp), "forward", flipped)


@change
def forward_of_a_class(model, patch):
    patch.setattr(type(layers_of(model)[1].mlp), "forward", lambda self, x: x.flip(-1))


@change
def code_of_a_forward(model, patch):
    def forward(self, x):
        return x.flip(-1)

    function = inspect.unwrap(type(layers_of(model)[1].mlp).forward)
    patch.setattr(function, "__code__", forward.__code__)


@change
def function_that_a_forward_calls(model, patch):
    usual = torch.nn.functional.linear
    patch.setattr(torch.nn.functional, "linear", lambda *args: usual(*args).flip(-1))


@change
def eps_of_norms(model, patch):
    for layer in layers_of(model):
        patch.setattr(layer.input_layernorm, "eps", 100.0)


@change
def class_of_a_module(model, patch):
    mlp = layers_of(model)[1].mlp
    own = type("Own", (type(mlp),), {"forward": lambda self, x: x.flip(-1)})
    patch.setattr(mlp, "__class__", own)


@change
def weight(model, patch):
    norm = layers_of(model)[1].post_feedforward_layernorm
    patch.setitem(norm._parameters, "weight", torch.nn.Parameter(norm.weight.flip(0) * 3))


@change
def data_of_a_weight(model, patch):
    norm = layers_of(model)[1].post_feedforward_layernorm
    patch.setattr(norm.weight, "data", norm.weight.data.flip(0) * 3)


@change
def strides_of_a_weight(model, patch):
    weight = layers_of(model)[1].post_feedforward_layernorm.weight
    patch.setattr(weight, "data", weight.data[:1].expand(len(weight)))  # at the same address


@change
def buffer_of_one_number(model, patch):
    patch.setitem(
        layers_of(model)[1]._buffers, "layer_scalar", torch.tensor([3.0], device=model.device)
    )


@change
def head(model, patch):
    patch.setitem(
        model.lm_head._parameters, "weight", torch.nn.Parameter(model.lm_head.weight.flip(0))
    )


@change
def hook(model, patch):
    handle = layers_of(model)[1].mlp.register_forward_hook(lambda module, args, output: -output)
    patch.callback(handle.remove)


@change
def lora_scaling_of_middle_layers(model, patch):
    for layer in lora_layers(model)[2:-2]:
        patch.setitem(layer.scaling, "default", 40.0)


@change
def scaled_layers(model, patch):
    for layer in lora_layers(model)[2:-2]:
        before = dict(layer.scaling)
        layer.scale_layer(20.0)
        patch.callback(functools.partial(layer.scaling.update, before))


@change
def merged_middle_layers(model, patch):
    for layer in lora_layers(model)[2:-2]:
        weight = copy.deepcopy(layer.base_layer.weight)
        patch.setitem(layer.base_layer._parameters, "weight", weight)
        patch.setitem(vars(layer), "merged_adapters", [])
        patch.setitem(layer.scaling, "default", 40.0)
        layer.merge()


@change
def adapter_of_middle_layers(model, patch):
    for layer in lora_layers(model)[2:-2]:
        patch.setattr(layer, "_disable_adapters", True)


@change
def rank_of_an_adapter(model, patch):
    for layer in lora_layers(model):
        matrix = layer.lora_B["default"]
        patch.setitem(matrix._parameters, "weight", torch.nn.Parameter(matrix.weight * 100))


@change
def dictionary_of_parameters(model, patch):
    norm = layers_of(model)[1].post_feedforward_layernorm
    own = {"weight": torch.nn.Parameter(norm.weight.flip(0) * 3)}
    patch.setitem(vars(norm), "_parameters", own)


class Patch(pytest.MonkeyPatch):
    """Undoes changes in the opposite order."""

    def __init__(self):
        super().__init__()
        self.callbacks = []

    def callback(self, function):
        self.callbacks.append(function)

    def undo(self):
        while self.callbacks:
            self.callbacks.pop()()
        super().undo()


class User:
    """Changes the model at its fourth call; a processor, a criterion and a streamer at once."""

    def __init__(self, act):
        self.act, self.calls, self.tokens = act, 0, []

    def called(self):
        self.calls += 1
        if self.calls == AT:
            self.act()


class Processor(User, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.called()
        return scores


class Criterion(User, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.called()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Streamer(User, BaseStreamer):
    def put(self, value):
        self.called()

    def end(self):
        pass


WAYS = {
    "processor": lambda act: {"logits_processor": LogitsProcessorList([Processor(act)])},
    "criterion": lambda act: {"stopping_criteria": [Criterion(act)]},
    "streamer": lambda act: {"streamer": Streamer(act)},
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def model(request, model_dir, adapter_dir):
    from peft import PeftModel

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            pretend(patch)
        kind = None if request.param == "cpu" else "nf4"
        base = load_model(model_dir, kind, {"": 0 if request.param == "cuda" else "cpu"})
        yield PeftModel.from_pretrained(base, adapter_dir).eval().get_base_model()


def generated(model, eager=False, **options):
    ids = torch.tensor([[5, 17, 101, 33]], device=model.device)
    vars(model).pop("_cache", None)  # older releases keep the cache of the last call
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), cache_implementation="static",
        disable_compile=eager, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return torch.stack(output.logits)


def play(model, way, name, eager):
    patch = Patch()
    try:
        return generated(model, eager, **WAYS[way](lambda: CHANGES[name](model, patch)))
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def usual(model):
    """The logits of a call in which nothing changes; its steps are captured."""
    logits = generated(model, eager=True)
    assert torch.equal(generated(model), logits)
    return logits


def check(model, usual, way, name):
    expected = play(model, way, name, eager=True)
    assert torch.equal(play(model, way, name, eager=False), expected)
    assert torch.equal(generated(model), usual)
    assert vars(model)["_decoding"].states[0].warm  # its steps are captured
    return expected


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_counts_from_the_next_token_on(model, usual, name):
    assert not torch.equal(check(model, usual, "processor", name), usual)


@pytest.mark.parametrize("way", ["criterion", "streamer"])
@pytest.mark.parametrize("name", ["soft_cap", "forward_of_a_class"])
def test_the_code_of_other_objects(model, usual, way, name):
    assert not torch.equal(check(model, usual, way, name), usual)
