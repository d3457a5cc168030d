"""The update of a LoRA adapter on a 4-bit layer, for one row of inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import gemma4_compat
from gemma4_compat.runtime.kernels import compiler, launch, one_row_4bit
from gemma4_compat.runtime.kernels import one_row_lora as kernel
from gemma4_compat.runtime.kernels.compiler import KernelError
from tests import support
from tests.patches.test_captured_decoding import (
    assert_same,
    captures,
    generated,
    load_model,
    prompt,
)
from tests.patches.test_one_row_4bit import assert_as_exact, one_token

#: rows and columns of the layers of E2B and E4B
SHAPES = ((256, 1536), (12288, 1536), (1536, 12288), (1536, 256), (512, 2560), (2560, 10240))
RANKS = (1, 2, 3, 5, 8, 15, 16, 31, 32, 33, 64, 100, 128, 255, 256)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def config_of(seed=0, rank=16):
    from peft import LoraConfig

    torch.manual_seed(seed)
    targets = r".*language_model\.layers.*\.(q|k|v|o|gate|up|down)_proj"
    return LoraConfig(r=rank, target_modules=targets, init_lora_weights=False)


def adapted(model_dir, place=None):
    from peft import get_peft_model

    return get_peft_model(load_model(model_dir, "nf4", place), config_of()).eval()


def adapters_of(model):
    """The 4-bit layers with LoRA."""
    from peft.tuners.lora import bnb

    return [each for each in model.modules() if type(each) is bnb.Linear4bit]


def layer_of(outputs=96, inputs=512, rank=16, adapter=torch.float32, device="cuda", **options):
    """A 4-bit layer with random LoRA."""
    from peft import LoraConfig, inject_adapter_in_model

    model = nn.Sequential(support.linear4bit(inputs, outputs))
    model.is_loaded_in_4bit = True
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0"], **options)
    layer = inject_adapter_in_model(config, model).to(device).eval()[0]
    torch.manual_seed(0)
    for each in (layer.lora_A, layer.lora_B):
        each.to(adapter)
        each.default.weight.data.copy_(torch.randn(each.default.weight.shape) / 32)
    return layer


def inputs_of(layer, dtype=torch.bfloat16, seed=0):
    """A row, and a result of the base layer."""
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = layer.in_features, layer.out_features
    return [torch.randn(1, 1, n, generator=generator, device="cuda").to(dtype) for n in sizes]


def exact(layer, row, result):
    a, b = (each.default.weight.double() for each in (layer.lora_A, layer.lora_B))
    return result.double() + (row.double() @ a.T @ b.T) * layer.scaling["default"]


def update_of(layer, row):
    adapter = kernel.adapter_of(layer, row)
    return None if adapter is None else kernel.update_of(layer, row, *adapter)


@torch.no_grad()
def sums(layer, row, result):
    """The kernels', and PEFT's."""
    _, added, by_peft = update_of(layer, row)
    own = added(result)
    assert own is not None
    return own, by_peft(result)


class Seen(TorchFunctionMode):
    """The weights that linear layers multiply with."""

    def __init__(self):
        super().__init__()
        self.weights = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            self.weights.add(id(args[1]))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def calls(monkeypatch):
    """The layers whose update is computed in the kernels; here it is 0."""
    layers = []

    def update_of(layer, row, *adapter):
        layers.append(layer)
        return None, torch.clone, None

    monkeypatch.setattr(kernel, "plain", lambda: lambda row: True)
    monkeypatch.setattr(kernel, "update_of", update_of)
    return layers


@pytest.mark.regression("one_row_lora", r"PEFT multiplies one row")
def test_who_multiplies(model_dir, calls):
    model = adapted(model_dir)
    weights = {id(each.lora_A.default.weight) for each in adapters_of(model)}
    assert len(weights) >= 10
    with Seen() as seen:
        one_token(model)
    by_peft = len(weights & seen.weights)
    assert not by_peft, f"PEFT multiplies one row with {by_peft} adapters"


@pytest.mark.cuda
@pytest.mark.regression("one_row_lora", r"PEFT multiplies one row")
def test_forward_of_one_token(model_dir):
    from torch.profiler import ProfilerActivity, profile

    model = adapted(model_dir, {"": 0})
    one_token(model)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        one_token(model)
    launches = sum(each.name == "one_row_lora" for each in profiler.events())
    assert launches >= len(adapters_of(model)) >= 10, "PEFT multiplies one row"


# -- the kernels ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("adapter", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors(dtype, adapter):
    for outputs, inputs in SHAPES:
        layer, errors, scale = layer_of(outputs, inputs, 16, adapter), [], 0.0
        for seed in range(20):
            row, result = inputs_of(layer, dtype, seed)
            true = exact(layer, row, result)
            scale = max(scale, true.abs().max().item())
            errors.append([(each - true).abs() for each in sums(layer, row, result)])
        assert_as_exact(errors, torch.finfo(dtype).eps, scale)


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("small", [0, 1 << 30], ids=["two kernels", "one kernel"])
def test_a_row_beside_others_is_the_same(small, monkeypatch):
    monkeypatch.setattr(kernel, "_SMALL", small)
    launch.reset(compiled=False)
    layer = layer_of(300, 576)
    all_rows = [inputs_of(layer, seed=seed) for seed in range(8)]
    alone = torch.cat([sums(layer, *each)[0] for each in all_rows], 1)
    for tokens in range(2, 9):
        rows, results = (torch.cat(each[:tokens], 1) for each in zip(*all_rows, strict=True))
        assert torch.equal(sums(layer, rows, results)[0], alone[:, :tokens])


@pytest.mark.cuda
@pytest.mark.parametrize("small", [0, 1 << 30], ids=["two kernels", "one kernel"])
@pytest.mark.parametrize("rank", RANKS)
def test_ranks(rank, small, monkeypatch):
    monkeypatch.setattr(kernel, "_SMALL", small)
    launch.reset(compiled=False)
    for adapter in FLOATS:
        layer, errors, scale = layer_of(300, 576, rank, adapter), [], 0.0
        for seed in range(20):
            row, result = inputs_of(layer, seed=seed)
            true = exact(layer, row, result)
            scale = max(scale, true.abs().max().item())
            errors.append([(each - true).abs() for each in sums(layer, row, result)])
        assert_as_exact(errors, torch.finfo(torch.bfloat16).eps, scale)


@pytest.mark.cuda
@pytest.mark.parametrize("case", ["dominant", "canceled", "subnormal", "large"])
def test_errors_of_unusual_values(case):
    errors, scale = [], torch.finfo(torch.bfloat16).tiny
    layer = layer_of(256, 1536)
    a = layer.lora_A.default.weight.data
    if case == "dominant":
        a[:, 5] = 300
    elif case == "canceled":
        a[:, 1::2] = a[:, ::2]
    for seed in range(20):
        row, result = inputs_of(layer, seed=seed)
        if case == "dominant":
            row[..., 5] = 300
        elif case == "canceled":
            row[..., 1::2] = -row[..., ::2]
        elif case == "subnormal":
            row, result = row * 2.0**-130, result * 2.0**-130
        else:
            row, result = row * 2.0**118, result * 2.0**118
        true = exact(layer, row, result)
        scale = max(scale, true.abs().max().item())
        both = sums(layer, row, result)
        assert both[0].isfinite().all()
        errors.append([(each - true).abs() for each in both])
    assert_as_exact(errors, torch.finfo(torch.bfloat16).eps, scale)


@pytest.mark.cuda
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", ["row", "result", "a", "b"])
def test_what_is_not_finite_stays_so(value, place):
    layer = layer_of()
    row, result = inputs_of(layer)
    weights = layer.lora_A.default.weight.data, layer.lora_B.default.weight.data
    {"row": row[0], "result": result[0], "a": weights[0], "b": weights[1]}[place][0, 7] = value
    own, theirs = sums(layer, row, result)
    assert not own.isfinite().all()
    assert torch.equal(own.isfinite(), theirs.isfinite())
    assert torch.equal(own.isnan(), theirs.isnan())


@pytest.mark.cuda
@torch.no_grad()
def test_what_the_kernels_leave_to_peft(monkeypatch):
    layer = layer_of()
    row, result = inputs_of(layer)
    layer.set_scale("default", 0.5)
    _, added, by_peft = update_of(layer, row)
    torch.testing.assert_close(added(result), by_peft(result), rtol=0.02, atol=0.02)
    assert added(result[..., ::2]) is None
    assert added(result.float()) is None
    for other in (row.repeat(1, 9, 1), row.float(), row[..., :256], row.cpu()):
        assert update_of(layer, other) is None
    with torch.enable_grad():
        assert update_of(layer, row) is None
    with torch.autocast("cuda", torch.bfloat16):
        assert update_of(layer, row) is None
    layer.lora_A.double()
    assert update_of(layer, row) is None


@pytest.mark.cuda
@torch.no_grad()
def test_memory_is_short_for_a_while(monkeypatch):
    layer = layer_of()
    row, _ = inputs_of(layer)
    launch.reset()
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "compiled", support.fails(KernelError("out of memory")))
        assert update_of(layer, row) is None
    assert update_of(layer, row) is not None
    assert not launch.without()


# -- captured steps -------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("place", ["whole", "PLE"])
def test_captured_steps_equal_eager_steps(model_dir, place):
    ple = {"model.language_model.embed_tokens_per_layer": "cpu"} if place == "PLE" else {}
    model = adapted(model_dir, {"": 0, **ple})
    expected = generated(model, prompt(model), eager=True)
    with gemma4_compat.disabled("one_row_lora"):
        theirs = generated(model, prompt(model), eager=True)
    assert not torch.equal(theirs[1], expected[1]), "the kernels ran"
    for _ in range(2):
        assert_same(generated(model, prompt(model)), expected)
    assert captures(model) == 1
    model.add_adapter("second", config_of(1, 8))
    model.set_adapter("second")
    expected = generated(model, prompt(model), eager=True)
    assert_same(generated(model, prompt(model)), expected)
    for layer in adapters_of(model):
        layer.scale_layer(0.25)
    expected = generated(model, prompt(model), eager=True)
    assert_same(generated(model, prompt(model)), expected)
    with model.disable_adapter():
        expected = generated(model, prompt(model), eager=True)
        assert_same(generated(model, prompt(model)), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("order", ["adapter first", "adapter last"])
def test_offloaded_layers_equal_those_on_the_gpu(model_dir, tmp_path, order):
    from peft import PeftModel

    model = adapted(model_dir, {"": 0})
    expected = generated(model, prompt(model), eager=True)
    assert_same(generated(model, prompt(model)), expected)
    if order == "adapter first":
        support.with_layers_on_the_cpu(model.get_base_model())
    else:
        model.save_pretrained(tmp_path)
        base = support.with_layers_on_the_cpu(load_model(model_dir, "nf4", {"": 0}))
        model = PeftModel.from_pretrained(base, tmp_path).eval()
    assert_same(generated(model, prompt(model), eager=True), expected)
    assert_same(generated(model, prompt(model)), expected)
    assert captures(model)


# -- without a GPU --------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("is_launched", [True, False])
def test_offloaded_adapters(model_dir, monkeypatch, is_launched):
    """accelerate's hooks have the weights of A and B there for the kernel, and take them away."""
    from accelerate import cpu_offload
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, seen = adapted(model_dir), []
    expected = one_token(model)

    def update_of(layer, row, first, second, dropout, scaling):
        seen.extend((first, second))
        assert not (first.weight.is_meta)
        assert not (second.weight.is_meta)

        def by_peft(result):
            update = second(first(dropout(layer._cast_input_dtype(row, first.weight.dtype))))
            return result + (update * scaling).to(result.dtype)

        return None, by_peft if is_launched else lambda result: None, by_peft

    monkeypatch.setattr(kernel, "plain", lambda: lambda row: True)
    monkeypatch.setattr(kernel, "update_of", update_of)
    assert torch.equal(one_token(model), expected)
    on_the_gpu = len(seen)
    assert on_the_gpu >= 20
    cpu_offload(model.model.model.language_model.layers, torch.device("cpu"))
    for _ in range(2):
        seen.clear()
        assert torch.equal(one_token(model), expected)
        assert len(seen) == on_the_gpu
        assert all(each.weight.is_meta for each in seen)
    add_hook_to_module(seen[0], ModelHook(), append=True)
    seen.clear()
    assert torch.equal(one_token(model), expected)
    assert len(seen) == on_the_gpu - 2, "PEFT calls the user's hook"
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(one_token(model), expected)


def test_nothing_changes_on_the_cpu(model_dir):
    model = adapted(model_dir)
    found = one_token(model)
    with gemma4_compat.disabled("one_row_lora"):
        assert torch.equal(one_token(model), found)


@torch.no_grad()
def test_only_forwards_of_a_few_tokens(model_dir, calls):
    model = adapted(model_dir)
    ids = torch.arange(5, 14)[None]
    model(input_ids=ids)
    adapters_of(model)[0](torch.randn(1, 1, adapters_of(model)[0].in_features))
    assert not calls
    model(input_ids=ids[:, :8])
    assert set(calls) <= set(adapters_of(model))
    assert calls


@torch.no_grad()
def test_a_launch_that_fails(model_dir, monkeypatch):
    """The base layer and its hooks run once, and the rest is PEFT's."""
    model = adapted(model_dir)
    expected, failures, runs = one_token(model), [], []
    device = torch.device("cpu")

    def fail(*_):
        failures.append(0)
        support.fails(RuntimeError("CUDA out of memory"))()

    monkeypatch.setattr(kernel, "plain", lambda: lambda row: row.device == device)
    monkeypatch.setattr(kernel, "current_device", lambda: lambda: -1)
    launch.reset()
    monkeypatch.setattr(kernel, "_launch", lambda *_: fail)
    monkeypatch.setattr(kernel, "ALIGNMENT", 1)
    layers = adapters_of(model)
    for layer in layers:
        layer.base_layer.register_forward_hook(lambda *_: runs.append(0))
    assert torch.equal(one_token(model), expected)
    assert len(failures) == len(runs) >= 10

    row = torch.randn(1, 1, layers[0].in_features, dtype=torch.bfloat16)

    def is_left_to_peft():
        return kernel.adapter_of(layers[0], row) is None

    first = layers[0].lora_A.default
    assert not is_left_to_peft()
    for change in (
        lambda: first.register_forward_hook(lambda *_: None),
        lambda: first.register_forward_pre_hook(lambda *_: None),
        lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
    ):
        handle = change()
        assert is_left_to_peft()
        handle.remove()
    first.forward = first.forward  # as accelerate leaves it when it removes a hook
    assert not is_left_to_peft()
    first.forward = lambda inputs: nn.functional.linear(inputs, first.weight)
    assert is_left_to_peft()
    del first.forward
    layers[0].lora_dropout["default"] = nn.Dropout(0.5)
    assert is_left_to_peft()
    layers[0].lora_dropout.eval()
    assert not is_left_to_peft()
    layers[0].enable_adapters(False)
    assert is_left_to_peft()
    layers[0].enable_adapters(True)
    layers[0].lora_variant["default"] = object()
    assert is_left_to_peft()
    del layers[0].lora_variant["default"]
    layers[0].merged_adapters.append("default")
    assert is_left_to_peft()
    layers[0].merged_adapters.clear()
    layers[0].cast_input_dtype_enabled = False
    assert is_left_to_peft()
    layers[0].cast_input_dtype_enabled = True
    model.add_adapter("second", config_of(1, 8))
    model.base_model.set_adapter(["default", "second"])
    assert is_left_to_peft()
    model.set_adapter("second")
    assert not is_left_to_peft()


def test_a_subclass_and_arguments_are_left_to_peft(calls):
    layer = layer_of(device="cpu")
    row = torch.randn(1, 512, dtype=torch.bfloat16)
    with torch.no_grad(), one_row_4bit.few_tokens():
        layer(row, adapter_names=["default"])
        layer.__class__ = type("Own", (type(layer),), {})
        layer(row)
    assert not calls


@torch.no_grad()
def test_compiled_layers(calls):
    layer, row = layer_of(device="cpu"), torch.randn(1, 512, dtype=torch.bfloat16)
    expected = layer(row)
    compiled = torch.compile(lambda inputs: layer(inputs), backend="eager")
    with one_row_4bit.few_tokens():
        assert torch.equal(compiled(row), expected)
    assert not calls


@pytest.mark.parametrize(
    ("forward", "state"),
    [
        (lambda self, x: self.lora_A(x), "drifted"),
        (lambda self, x: self.add_update(x), "fixed upstream"),
    ],
)
def test_other_releases(forward, state):
    from peft.tuners.lora import bnb

    with gemma4_compat.disabled("one_row_lora"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(bnb.Linear4bit, "forward", forward)
        assert gemma4_compat.install("one_row_lora")["one_row_lora"].state == state
        gemma4_compat.uninstall("one_row_lora")
