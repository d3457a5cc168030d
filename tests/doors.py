"""The doors through which a user's code gets into a decode step, for ``tests/test_doors.py``.

A door is a function.  It gets a model, whose step it changes, an ``Own``, whose code it puts there,
and a ``pytest.MonkeyPatch`` that closes the door.  A door that has to surround the call yields.
"""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DOORS: dict[str, Callable] = {}


def door(function=None, verdict="eager", of_a_call=False):
    """Register a door.

    Args:
        verdict: how steps run while it is open.
        of_a_call: whether it opens with the next call, as it changes new caches.
    """
    if function is None:
        return functools.partial(door, verdict=verdict, of_a_call=of_a_call)
    function.verdict, function.of_a_call = verdict, of_a_call
    DOORS[function.__name__] = function
    return function


class Own:
    """Code with a state in Python: it counts its calls, and changes values more with each."""

    def __init__(self):
        self.calls, self.restore = 0, lambda: None

    def changed(self, value):
        self.calls += 1
        return value + 0.5 * math.sin(self.calls)

    def around(self, function):
        @functools.wraps(function)
        def own(*args, **kwargs):
            output = function(*args, **kwargs)
            if isinstance(output, tuple):
                return (self.changed(output[0]), *output[1:])
            return self.changed(output)

        return own


def layers_of(model):
    return model.get_submodule("model.language_model.layers")


def modeling(model):
    return sys.modules[type(model).__module__]


# -- forwards and modules


@door
def forward_of_an_instance(model, own, patch):
    mlp = layers_of(model)[1].mlp
    patch.setitem(vars(mlp), "forward", own.around(mlp.forward))


@door
def a_forward_that_reads_values(model, own, patch):
    """A capture of it fails half way, after the code has run."""
    mlp = layers_of(model)[1].mlp
    usual = mlp.forward

    def forward(hidden):
        output = own.changed(usual(hidden))
        return output * (2 if output.sum().item() > 0 else 1)

    patch.setitem(vars(mlp), "forward", forward)


@door
def forward_of_a_class(model, own, patch):
    kind = type(layers_of(model)[1].mlp)
    patch.setattr(kind, "forward", own.around(kind.forward))


@door
def forward_of_the_model(model, own, patch):
    forward = model.forward

    @functools.wraps(forward)
    def own_forward(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = own.changed(output.logits)
        return output

    patch.setitem(vars(model), "forward", own_forward)


@door
def a_subclass_of_the_model(model, own, patch):
    kind = type(model)

    class Mine(kind):
        @functools.wraps(kind.forward)
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = own.changed(output.logits)
            return output

    Mine.__name__, Mine.__module__ = kind.__name__, kind.__module__
    own.restore = functools.partial(setattr, model, "__class__", type(model))
    model.__class__ = Mine


@door
def an_own_module(model, own, patch):
    class Mine(nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp
            self.train(mlp.training)

        def forward(self, hidden):
            return own.changed(self.mlp(hidden))

    layer = layers_of(model)[1]
    patch.setitem(layer._modules, "mlp", Mine(layer.mlp))


@door
def the_class_of_a_module(model, own, patch):
    mlp = layers_of(model)[1].mlp

    class Mine(type(mlp)):
        def forward(self, hidden):
            return own.changed(super().forward(hidden))

    own.restore = functools.partial(setattr, mlp, "__class__", type(mlp))
    mlp.__class__ = Mine


@door
def call_of_a_class(model, own, patch):
    kind = type(layers_of(model)[1].mlp)
    patch.setattr(kind, "__call__", own.around(kind.__call__), raising=False)


@door
def call_impl_of_an_instance(model, own, patch):
    mlp = layers_of(model)[1].mlp
    patch.setitem(vars(mlp), "_call_impl", own.around(mlp._call_impl))


@door
def call_of_every_module(model, own, patch):
    usual = nn.Module.__call__
    mlp = layers_of(model)[1].mlp

    def call(self, *args, **kwargs):
        output = usual(self, *args, **kwargs)
        return own.changed(output) if self is mlp else output

    patch.setattr(nn.Module, "__call__", call)


@door
def code_of_a_function(model, own, patch):
    """IPython's autoreload keeps a function, and gives it new code."""
    function = modeling(model).rotate_half
    new = own.around(types.FunctionType(function.__code__, vars(modeling(model))))
    patch.setattr(modeling(model), "own_rotate_half", new, raising=False)
    patch.setattr(function, "__code__", calls_own.__code__)


def calls_own(x):
    return own_rotate_half(x)  # noqa: F821  (a name in the function's module)


@door
def an_activation(model, own, patch):
    mlp = layers_of(model)[1].mlp
    patch.setitem(mlp.__dict__, "act_fn", own.around(mlp.act_fn))


@door
def a_parametrisation(model, own, patch):
    class Shifted(nn.Module):
        def forward(self, weight):
            return own.changed(weight)

    norm = layers_of(model)[1].post_feedforward_layernorm
    own.restore = lambda: parametrize.remove_parametrizations(norm, "weight", False)
    parametrize.register_parametrization(norm, "weight", Shifted().eval(), unsafe=True)


@door
def a_tensor_subclass(model, own, patch):
    class Weight(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                output = function(*args, **(kwargs or {}))
            computes = function in (torch.Tensor.float, torch.Tensor.__mul__, torch.Tensor.mul)
            return own.changed(output) if computes else output

    norm = layers_of(model)[1].post_feedforward_layernorm
    patch.setitem(norm._parameters, "weight", norm.weight.detach().as_subclass(Weight))


@door
def a_mock_that_records(model, own, patch):
    mlp = layers_of(model)[1].mlp
    recorder = mock.Mock(wraps=mlp.forward)
    own.restore = lambda: setattr(own, "calls", recorder.call_count)
    patch.setitem(vars(mlp), "forward", recorder)


# -- hooks


@door
def a_hook_of_a_module(model, own, patch):
    mlp = layers_of(model)[1].mlp
    handle = mlp.register_forward_hook(lambda module, args, output: own.changed(output))
    own.restore = handle.remove


@door
def a_hook_for_all_modules(model, own, patch):
    mlp = layers_of(model)[1].mlp
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: own.changed(output) if module is mlp else None
    )
    own.restore = handle.remove


@door
def a_hook_of_accelerate(model, own, patch):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Mine(ModelHook):
        def post_forward(self, module, output):
            return own.changed(output)

    mlp = layers_of(model)[1].mlp
    own.restore = lambda: remove_hook_from_module(mlp)
    add_hook_to_module(mlp, Mine())


# -- functions


@door
def a_registered_attention(model, own, patch):
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    table = model.model.language_model.config
    usual = AttentionInterface._global_mapping["sdpa"]
    patch.setitem(AttentionInterface._global_mapping, "mine", own.around(usual))
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    patch.setitem(AttentionMaskInterface._global_mapping, "mine", mask)
    patch.setattr(table, "_attn_implementation_internal", "mine")


@door
def the_usual_attention(model, own, patch):
    from transformers import AttentionInterface

    table = AttentionInterface._global_mapping
    patch.setitem(table, "sdpa", own.around(table["sdpa"]))


@door
def the_rotary_function(model, own, patch):
    module = modeling(model)
    patch.setattr(module, "apply_rotary_pos_emb", own.around(module.apply_rotary_pos_emb))


@door
def a_function_of_torch(model, own, patch):
    patch.setattr(torch, "tanh", own.around(torch.tanh))


@door
def a_function_of_functional(model, own, patch):
    patch.setattr(nn.functional, "embedding", own.around(nn.functional.embedding))


@door
def a_method_of_tensor(model, own, patch):
    usual = torch.Tensor.transpose
    patch.setattr(torch.Tensor, "transpose", own.around(usual))


@door
def a_kernel_of_torch(model, own, patch):
    def tanh(value):
        own.calls += 1
        return torch.sigmoid(2 * value) * 2 - 1 + 0.5 * math.sin(own.calls)

    library = torch.library.Library("aten", "IMPL")
    a_kernel_of_torch.kept.append(library)  # its end would take back the kernel of the next one
    own.restore = library._destroy
    library.impl("tanh", tanh, layers_of(model)[0].layer_scalar.device.type.upper())


a_kernel_of_torch.kept = []


@door(verdict="captured")
def a_function_that_makes_masks(model, own, patch):
    """Masks are made before the step, so the function runs for each captured step, too."""
    from transformers.masking_utils import AttentionMaskInterface

    table = AttentionMaskInterface._global_mapping
    usual = table["sdpa"]

    @functools.wraps(usual)
    def mask(*args, **kwargs):
        own.calls += 1
        made = usual(*args, **{**kwargs, "allow_is_causal_skip": False})
        made[..., 1] &= own.calls % 3 > 0
        return made

    patch.setitem(table, "sdpa", mask)


# -- caches


@door
def update_of_a_class_of_layers(model, own, patch):
    from transformers.cache_utils import StaticLayer

    usual = StaticLayer.update

    def update(self, keys, values, *args, **kwargs):
        own.calls += 1
        return usual(self, keys + 0.5 * math.sin(own.calls), values, *args, **kwargs)

    patch.setattr(StaticLayer, "update", update)


@door(of_a_call=True)
def update_of_one_layer(model, own, patch):
    from transformers.cache_utils import StaticLayer

    usual = StaticLayer.__init__

    def init(self, *args, **kwargs):
        usual(self, *args, **kwargs)
        update = self.update

        def own_update(keys, *args, **kwargs):
            return update(own.changed(keys), *args, **kwargs)

        self.update = own_update

    patch.setattr(StaticLayer, "__init__", init)


@door(of_a_call=True)
def an_own_layer(model, own, patch):
    from transformers.cache_utils import StaticCache, StaticLayer

    class Mine(StaticLayer):
        def update(self, keys, *args, **kwargs):
            return super().update(own.changed(keys), *args, **kwargs)

    usual = StaticCache.__init__

    def init(self, *args, **kwargs):
        usual(self, *args, **kwargs)
        for layer in self.layers:
            if type(layer) is StaticLayer:
                layer.__class__ = Mine

    patch.setattr(StaticCache, "__init__", init)


@door
def update_of_the_caches(model, own, patch):
    from transformers.cache_utils import StaticCache

    usual = StaticCache.update

    def update(self, keys, *args, **kwargs):
        return usual(self, own.changed(keys), *args, **kwargs)

    patch.setattr(StaticCache, "update", update, raising=False)


# -- modes


@door
def a_function_mode(model, own, patch):
    class Mine(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            return own.changed(output) if function is torch.tanh else output

    with Mine():
        yield


@door
def a_dispatch_mode(model, own, patch):
    class Mine(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            return own.changed(output) if function is torch.ops.aten.tanh.default else output

    with Mine():
        yield


# -- adapters


@door
def forward_of_lora(model, own, patch):
    layer = layers_of(model)[1].mlp.down_proj
    if hasattr(layer, "lora_A"):
        layer = layer.lora_B["default"]
    patch.setitem(vars(layer), "forward", own.around(layer.forward))


@door
def a_variant_of_lora(model, own, patch):
    layer = layers_of(model)[1].mlp.down_proj

    class Mine:
        @staticmethod
        def forward(module, active_adapter, x, result, **kwargs):
            return own.changed(result)

    variants = getattr(layer, "lora_variant", None)
    if variants is None:  # an older PEFT has none
        return forward_of_lora(model, own, patch)
    patch.setitem(variants, "default", Mine())


def log_in_each_step(patch, logger):
    """As if a library logged a line in each of its layers."""
    usual = nn.functional.linear

    def linear(*args):
        logger.warning("a line")
        return usual(*args)

    patch.setattr(nn.functional, "linear", linear)
