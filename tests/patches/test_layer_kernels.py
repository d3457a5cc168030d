"""What is between the products of a decoder layer runs in a few kernels, with the same bits."""

from __future__ import annotations

import gc
import inspect
import textwrap
from contextlib import nullcontext
from functools import partial, wraps

import pytest
import torch
from torch import nn

import gemma4_compat
from gemma4_compat.engine.signatures import calling
from gemma4_compat.runtime.kernels import decoder_layer, launch, replacing
from tests.patches.test_norm_kernels import launched, logits, make

FAMILIES = ("gemma4", "unified")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def assert_few_kernels(kind):
    model, ids = make(kind), torch.tensor([[7]], device="cuda")
    with torch.no_grad():
        names = launched(lambda: model(ids))
    layers = len(model.model.layers)
    gelus = sum("Gelu" in name for name in names)
    assert gelus == 0, f"{gelus} kernels for the activations of {layers} layers"
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    assert names.count("rms_norm") == norms - layers  # the one before the MLP is in a sum
    assert names.count("gated") == (2 if kind == "gemma4" else 1) * layers
    assert launch.without() == []


@pytest.mark.cuda
@pytest.mark.regression("layer_kernels", r"\d kernels for the activations of 4 layers")
def test_few_kernels():
    assert_few_kernels("gemma4")


@pytest.mark.cuda
@pytest.mark.regression("layer_kernels", r"\d kernels for the activations of 4 layers")
def test_few_kernels_of_unified():
    assert_few_kernels("unified")


def assert_same(model, ids, **options):
    with gemma4_compat.disabled("layer_kernels"):
        expected = logits(model, ids, **options)
    for _ in range(2):
        assert torch.equal(logits(model, ids, **options), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (1, 9), (4, 2), (3, 1), (2, 40)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits(kind, dtype, shape):
    model = make(kind, dtype=dtype)
    for layer in model.model.layers:
        nn.init.normal_(layer.layer_scalar, 1, 0.2)
    assert_same(model, torch.randint(5, 96, shape, device="cuda"))
    assert launch.without() == []


@pytest.mark.cuda
def test_experts():
    import transformers

    config = make().config
    config.update({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2})
    config.update({"moe_intermediate_size": 64})
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config).to("cuda", torch.bfloat16).eval()
    assert_same(model, torch.tensor([[7]], device="cuda"))


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def replace_a_norm(layer):
    layer.post_attention_layernorm = Doubled()


def remove_a_norm(layer):
    layer.post_feedforward_layernorm = nn.Identity()


def change_a_forward(layer):
    norm = layer.pre_feedforward_layernorm
    norm.forward = lambda x: type(norm).forward(norm, x) + 1


def change_a_private_method(layer):
    layer.post_attention_layernorm._norm = lambda x: x


def change_a_class(layer):
    norm = layer.post_attention_layernorm
    norm.__class__ = type("Own", (type(norm),), {"forward": lambda self, x: 3 * x})


def change_an_eps(layer):
    layer.post_attention_layernorm.eps = 0.5


def hook_a_norm(layer):
    layer.post_per_layer_input_norm.register_forward_hook(lambda module, args, out: 2 * out)


def hook_an_input(layer):
    layer.pre_feedforward_layernorm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def hook_an_activation(layer):
    layer.mlp.act_fn.register_forward_hook(lambda module, args, out: 2 * out)


def replace_an_activation(layer):
    layer.act_fn = nn.GELU()
    layer.mlp.act_fn = nn.SiLU()


def change_an_activation(layer):
    layer.mlp.act_fn.act = partial(nn.functional.gelu, approximate="none")


def convert_a_norm(layer):
    layer.post_attention_layernorm.float()
    layer.layer_scalar = layer.layer_scalar.double() * 1.5


def train_a_scalar(layer):
    del layer.layer_scalar
    layer.layer_scalar = nn.Parameter(torch.full((1,), 1.5, device="cuda", dtype=torch.bfloat16))


def widen_a_scalar(layer):
    layer.layer_scalar = torch.rand(256, device="cuda", dtype=torch.bfloat16)


def replace_attention(layer):
    own = layer.self_attn.forward
    layer.self_attn.forward = lambda **kwargs: (own(**kwargs)[0].mT.contiguous().mT, None)


CHANGES = [
    replace_a_norm, remove_a_norm, change_a_forward, change_a_private_method, change_a_class,
    change_an_eps, hook_a_norm, hook_an_input, hook_an_activation, replace_an_activation,
    change_an_activation, convert_a_norm, train_a_scalar, widen_a_scalar, replace_attention,
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_the_user_put_there(change):
    """It runs as without the patch; so does what follows it."""
    model, ids = make(), torch.tensor([[7, 8]], device="cuda")
    logits(model, ids)
    usual = logits(model, ids)
    change(model.model.layers[1])
    assert_same(model, ids)
    assert not torch.equal(logits(model, ids), usual) or change is replace_attention


@pytest.mark.cuda
def test_captured_steps():
    model, ids = make(), torch.randint(5, 96, (1, 9), device="cuda")
    model.hf_device_map = {"": 0, "a tower": "cpu"}  # transformers does not compile such a model
    options = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": "static"}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with gemma4_compat.disabled("layer_kernels"):
        expected = model.generate(ids, **options).logits
    for _ in range(2):
        assert all(map(torch.equal, model.generate(ids, **options).logits, expected))


@pytest.mark.cuda
def test_a_kernel_that_computes_something_else(monkeypatch, caplog):
    """Its outputs are not used, and a line says so."""
    launch.reset()
    model, ids = make(), torch.tensor([[7]], device="cuda")
    with gemma4_compat.disabled("layer_kernels"):
        expected = logits(model, ids)
    monkeypatch.setattr(decoder_layer, "_FILE", decoder_layer._FILE.with_name("rotary.cu"))
    assert torch.equal(logits(model, ids), expected)
    [line] = launch.without()
    assert "transformers computes activations and products in its own kernels" in line
    launch.reset()


def as_on_a_gpu(monkeypatch):
    """Tensors count as those of a GPU, unless they have gradients."""
    monkeypatch.setattr(decoder_layer, "plain", lambda: lambda tensor: not tensor.requires_grad)


def without_kernels(model, monkeypatch):
    """Let forwards on the CPU be those of the patch; no kernel runs there."""

    def replace(cls, function):
        usual = inspect.unwrap(cls.forward)
        new = lambda *args, **kwargs: function(usual, *args, **kwargs)  # noqa: E731
        monkeypatch.setattr(cls, "forward", new)

    as_on_a_gpu(monkeypatch)
    layer = model.model.layers[0]
    replace(type(layer), decoder_layer.layer_forward)
    replace(type(layer.mlp), decoder_layer.mlp_forward)


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (1, 12)], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_order_of_a_layer(kind, shape, monkeypatch):
    """Without kernels, the layer computes what transformers computes."""
    model = make(kind, "cpu", torch.float32)
    ids = torch.randint(5, 96, shape, generator=torch.Generator().manual_seed(1))
    for layer in model.model.layers:
        nn.init.normal_(layer.layer_scalar, 1, 0.2)
    expected = logits(model, ids)
    without_kernels(model, monkeypatch)
    assert torch.equal(logits(model, ids), expected)
    model.model.layers[1].post_feedforward_layernorm = nn.Identity()
    assert not torch.equal(logits(model, ids), expected)


#: Releases that may come: a layer or an MLP with the same names, and another order.
_SUM, _KEPT = "hidden_states = residual +", "residual = hidden_states"
_NORMED = "hidden_states = self.pre_feedforward_layernorm(hidden_states)"
REWRITES = {
    "scalar on the branch": (
        "DecoderLayer", f"{_SUM} hidden_states\n\n", f"{_SUM} hidden_states * self.layer_scalar\n\n"
    ),
    "residual halved": ("DecoderLayer", _SUM, "hidden_states = residual / 2 +"),
    "norms swapped": (
        "DecoderLayer", "self.post_attention_layernorm(", "self.post_feedforward_layernorm("
    ),
    "a statement moved": (
        "DecoderLayer", f"{_KEPT}\n    {_NORMED}", f"{_NORMED}\n    {_KEPT}"
    ),
    "no positions": ("DecoderLayer", "=position_ids,", "=None,"),
    "another default": (
        "DecoderLayer", "position_ids: torch.LongTensor | None = None", "position_ids=1"
    ),
    "gate and up swapped": (
        "MLP", "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.act_fn(self.up_proj(x)) * self.gate_proj(x)",
    ),
}  # fmt: skip
#: those whose arguments make no difference for this model
SAME = ("no positions", "another default")


def rewritten(cls, old, new):
    """A class's forward with other code, as in another release of transformers."""
    usual = inspect.unwrap(cls.forward)
    source = textwrap.dedent(inspect.getsource(usual))
    source = source[source.index("def forward") :]
    assert old in source
    namespace = {}
    code = compile(source.replace(old, new), usual.__code__.co_filename, "exec")
    exec(code, usual.__globals__, namespace)
    return namespace["forward"]


def assert_another_order(kind, rewrite, device, monkeypatch):
    """The original runs, and a line says so; for what is not rewritten, the kernels run."""
    name, *texts = REWRITES[rewrite]
    model, ids = make(kind, device, torch.float32), torch.tensor([[7, 8]], device=device)
    for layer in model.model.layers:
        nn.init.normal_(layer.layer_scalar, 1, 0.2)
    usual = logits(model, ids)
    layer = model.model.layers[0]
    cls = type(layer if name == "DecoderLayer" else layer.mlp)
    new = rewritten(cls, *texts)
    monkeypatch.setattr(cls, "forward", new)
    expected = logits(model, ids)
    assert not torch.equal(expected, usual) or rewrite in SAME
    function = decoder_layer.layer_forward if name == "DecoderLayer" else decoder_layer.mlp_forward
    called = calling(function)(new)
    monkeypatch.setattr(cls, "forward", called)
    launch.reset()
    assert torch.equal(logits(model, ids), expected)
    [line] = launch.without()
    assert "transformers computes decoder layers or MLPs" in line
    launch.reset()


@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_another_order(kind, rewrite, monkeypatch):
    as_on_a_gpu(monkeypatch)
    assert_another_order(kind, rewrite, "cpu", monkeypatch)


@pytest.mark.cuda
@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_another_order_on_a_gpu(kind, rewrite, monkeypatch):
    assert_another_order(kind, rewrite, "cuda", monkeypatch)


def test_comparisons_of_a_layer(monkeypatch):
    """There is one for each kind and shape, without calls of the user's modules."""
    model, ids = make("gemma4", "cpu", torch.float32), torch.tensor([[7, 8]])
    without_kernels(model, monkeypatch)
    calls, compare = [], decoder_layer._same_layer
    monkeypatch.setattr(
        decoder_layer, "_same_layer", lambda *args: calls.append(args[2].shape) or compare(*args)
    )
    norms = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: norms.append(1))
    launch.reset()
    for _ in range(3):
        model(ids, use_cache=False)
    assert (calls, len(norms)) == ([], 3)  # gradients
    with torch.no_grad():
        for tokens in (ids, ids, ids[:, :1], ids):
            model(tokens, use_cache=False)
    assert (calls, len(norms)) == ([(1, 2, 256), (1, 1, 256)], 7)
    assert launch.without() == []


def checkpointed(model, reentrant=False):
    """The number of layers that ran in a checkpoint in a training step, and the gradients."""
    calls = []
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for layer in model.model.layers:
        checkpoint = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda *args, _run=checkpoint, **kwargs: (
            calls.append(1) or _run(*args, **kwargs)
        )
    ids = torch.arange(5, 11)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return len(calls), [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def installed_again(monkeypatch):
    """Afterwards, the patch is put in place where nothing has the functions that it replaces."""
    yield
    monkeypatch.undo()
    gc.collect()
    gemma4_compat.uninstall("layer_kernels")
    gemma4_compat.install("layer_kernels")


def subclass(layer):  # as fully_shard does
    layer.__class__ = type("Sub", (type(layer),), {})


def keep_forward(layer):  # as accelerate's hooks do
    layer.forward = layer.forward


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("change", [subclass, keep_forward, lambda layer: None])
@pytest.mark.parametrize("when", ["always", "then", "before"])
def test_gradient_checkpointing(change, reentrant, when, installed_again):
    """Each layer runs in one checkpoint, also if the patch is put in place or undone meanwhile."""
    with gemma4_compat.disabled("layer_kernels"):
        _, expected = checkpointed(make("gemma4", "cpu", torch.float32), reentrant)
    assert gemma4_compat.status()["layer_kernels"].state == "applied"
    with gemma4_compat.disabled("layer_kernels") if when == "then" else nullcontext():
        model = make("gemma4", "cpu", torch.float32)
        for layer in model.model.layers:
            change(layer)
    with gemma4_compat.disabled("layer_kernels") if when == "before" else nullcontext():
        calls, gradients = checkpointed(model, reentrant)
    assert calls == 4
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("name", ["DecoderLayer", "MLP"])
def test_a_wrapper_around_the_forward_of_a_class(name, monkeypatch, installed_again):
    """It runs with few tokens, too."""
    model, ids, calls = make("gemma4", "cpu", torch.float32), torch.tensor([[7]]), []
    layer = model.model.layers[0]
    cls = type(layer if name == "DecoderLayer" else layer.mlp)
    as_on_a_gpu(monkeypatch)
    with gemma4_compat.disabled("layer_kernels"):
        usual = cls.forward

        @wraps(usual)
        def forward(self, *args, **kwargs):
            calls.append(1)
            return 2 * usual(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", forward)
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert len(calls) == 8
    gemma4_compat.uninstall("layer_kernels")  # before the wrapper goes


@pytest.mark.parametrize("observed", [False, True])
def test_the_order_of_calls(observed, monkeypatch):
    """A hook of the activation runs before up_proj."""
    model, ids = make("gemma4", "cpu", torch.float32), torch.tensor([[7]])
    own = ("act_fn",) if observed else ()

    def events():
        seen = []
        hooks = [
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
            for name, module in model.named_modules()
            if not name.endswith("act_fn") or name.endswith(own or "none")
        ]
        with torch.no_grad():
            model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return seen

    expected = events()
    without_kernels(model, monkeypatch)
    assert events() == expected


def compiled(module):
    module.compile(backend="eager")


def call_of_a_class(module):
    module.__class__ = type("Own", (type(module),), {"__call__": lambda self, x: x})


def forward_of_another(module):
    module.forward = type(module)(256).forward


@pytest.mark.parametrize("change", [compiled, call_of_a_class, forward_of_another])
def test_what_a_call_runs(change):
    norm = make("gemma4", "cpu").model.norm
    assert replacing.runs_only(norm, type(norm).forward)
    assert decoder_layer._is_usual(norm)
    change(norm)
    assert not replacing.runs_only(norm, type(norm).forward)


def test_torch_compile():
    """The compiler sees the original code."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(str(graph.graph))
        return graph

    def compiled():
        model, ids = make("gemma4", "cpu", torch.float32), torch.tensor([[7]])
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            found = torch.compile(model, backend=keep)(ids, use_cache=False).logits
        assert torch.equal(found, expected)
        torch._dynamo.reset()

    compiled()
    with_patch = graphs.copy()
    graphs.clear()
    with gemma4_compat.disabled("layer_kernels"):
        compiled()
    assert with_patch == graphs


def test_arguments_of_a_layer(monkeypatch):
    """Those that transformers refuses are refused; the others can have names or not."""
    model, hidden = make("gemma4", "cpu", torch.float32), torch.randn(1, 2, 256)
    layer, angles = model.model.layers[0], tuple(torch.randn(2, 1, 2, 128))
    given = {
        "per_layer_input": torch.randn(1, 2, 128),
        "shared_kv_states": {},
        "position_embeddings": angles,
        "attention_mask": None,
    }
    usual = inspect.unwrap(type(layer).forward)
    names = [name for name in inspect.signature(usual).parameters if name in given]
    with torch.no_grad():
        expected = usual(layer, hidden, **given)
        without_kernels(model, monkeypatch)
        assert torch.equal(layer(hidden, **given), expected)
        ordered = [given[name] for name in names]
        assert torch.equal(layer(hidden, *ordered), expected)
        with pytest.raises(TypeError, match="multiple values"):
            layer(hidden, given["per_layer_input"], **given)
        with pytest.raises(TypeError, match="positional arguments"):
            layer(hidden, *ordered, *[None] * 9)
