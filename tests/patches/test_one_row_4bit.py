"""Products of one row of inputs with weights in 4 bits."""

from __future__ import annotations

import threading
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from torch import nn

import gemma4_compat
from gemma4_compat.patches.generation import one_row_4bit as patch
from gemma4_compat.runtime.kernels import compiler, launch
from gemma4_compat.runtime.kernels import one_row_4bit as kernel
from gemma4_compat.runtime.kernels.compiler import KernelError
from tests import support
from tests.patches.test_captured_decoding import (
    assert_same,
    captures,
    generated,
    load_model,
    new_model,
    prompt,
)
from tests.patches.test_cudnn_attention import make

#: rows and columns of the layers of E2B, E4B, 26B-A4B, 31B
SHAPES = (
    (256, 1536), (2048, 1536), (12288, 1536), (1536, 4096), (1536, 12288), (1536, 256),
    (512, 2560), (2560, 10240), (2112, 2816), (2816, 2112), (5376, 21504), (21504, 5376),
)  # fmt: skip


def quantized(model, nested=True, dtype=torch.bfloat16, device="cuda"):
    """The model on a GPU, with the linear layers of its text model in 4 bits."""
    import bitsandbytes as bnb

    model = model.to(dtype)
    for name, layer in list(model.model.named_modules()):
        if type(layer) is nn.Linear and layer.in_features % 64 == 0:
            new = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=dtype,
                compress_statistics=nested, quant_type="nf4",
            )  # fmt: skip
            new.weight = bnb.nn.Params4bit(
                layer.weight.data, requires_grad=False, quant_type="nf4",
                compress_statistics=nested, module=new,
            )  # fmt: skip
            new.support_avx512bf16_for_cpu = False  # which needs more than a few outputs
            model.model.set_submodule(name, new)
    return model.to(device).eval()


def packed(outputs, inputs, kind="nf4", nested=True, blocksize=64, seed=0, dtype=torch.bfloat16):
    """A random weight in 4 bits, and its values in float64."""
    from bitsandbytes import functional

    generator = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator, device="cuda", dtype=dtype)
    return functional.quantize_4bit(
        weight, quant_type=kind, compress_statistics=nested, blocksize=blocksize
    )


def values(weight, state):
    """The values of a weight in 4 bits, without rounding."""
    from bitsandbytes import functional

    maxima = state.absmax
    if state.nested:
        maxima = functional.dequantize_blockwise(maxima, state.state2) + state.offset
    numbers = weight.view(-1).view(torch.uint8)
    code = state.code.double()
    numbers = torch.stack([numbers >> 4, numbers & 15], -1).view(-1, state.blocksize)
    return (code[numbers.int()] * maxima.double()[:, None]).view(state.shape)


def products(row, weight, state):
    """The kernel's, and bitsandbytes'."""
    import bitsandbytes

    with torch.no_grad():
        own = kernel.product(bitsandbytes.matmul_4bit, row, weight, state)
        assert own is not None
        return own, bitsandbytes.matmul_4bit(row, weight.t(), quant_state=state)


def one_token(model):
    ids = torch.tensor([[7]], device=model.device)
    with torch.no_grad():
        return model(input_ids=ids).logits


def assert_more_exact(model):
    """In a forward of one token, the errors of the products are smaller than bitsandbytes'."""
    import bitsandbytes

    rows = []

    def keep(layer, args, output):
        rows.append((layer, args[0].clone(), output.clone()))

    layers = [each for each in model.modules() if isinstance(each, bitsandbytes.nn.Linear4bit)]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    one_token(model)
    for handle in handles:
        handle.remove()
    errors = torch.zeros(2, dtype=torch.float64)
    assert len(rows) >= 10
    for layer, row, found in rows:
        state = layer.weight.quant_state
        exact = row.double().view(-1) @ values(layer.weight.data, state).T
        with torch.no_grad():
            theirs = layer(row)
        for i, each in enumerate((found, theirs)):
            errors[i] += ((each.view(-1) - exact).norm() / exact.norm().clamp(min=1e-30)).cpu()
    assert errors[0] < 0.9 * errors[1], f"the products are not exact: {errors.tolist()}"


def assert_not_by_bitsandbytes(model, monkeypatch):
    """With a kernel for the CPU, which returns zeros: bitsandbytes multiplies no row."""
    from torch.profiler import ProfilerActivity, profile

    def product(original, inputs, weight, state):
        return inputs.new_zeros(*inputs.shape[:-1], state.shape[0])

    monkeypatch.setattr(kernel, "product", product)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        one_token(model)
    names = {each.name for each in profiler.events() if each.name.startswith("bitsandbytes::")}
    names = {name for name in names if "4bit" in name}
    assert not names, f"bitsandbytes multiplies one row: {sorted(names)}"


@pytest.mark.regression("one_row_4bit", r"bitsandbytes multiplies one row")
def test_who_multiplies(monkeypatch):
    assert_not_by_bitsandbytes(quantized(make(), dtype=torch.float32, device="cpu"), monkeypatch)


@pytest.mark.cuda
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "single"])
@pytest.mark.regression("one_row_4bit", r"the products are not exact")
def test_forward_of_one_token(nested):
    assert_more_exact(quantized(make(), nested))


@pytest.mark.cuda
@pytest.mark.parametrize(("tokens", "is_ours"), [(2, True), (8, True), (9, False)])
def test_forwards_of_several_tokens(tokens, is_ours):
    model = quantized(make())
    ids = torch.arange(7, 7 + tokens, device="cuda")[None]
    with torch.no_grad():
        found = model(input_ids=ids).logits
        with gemma4_compat.disabled("one_row_4bit"):
            assert torch.equal(model(input_ids=ids).logits, found) is not is_ours


# -- the kernel -----------------------------------------------------------------------------------


def assert_as_exact(errors, eps, scale):
    """``errors``: of the kernel and of bitsandbytes, for all outputs and seeds."""
    own, theirs = (torch.cat(each) for each in zip(*errors, strict=True))
    assert own.median() <= theirs.median()
    assert own.max() <= 1.1 * theirs.max() + eps * scale


@pytest.mark.cuda
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "single"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors(dtype, nested):
    for outputs, inputs in SHAPES:
        kind = "fp4" if outputs == 2048 else "nf4"
        weight, state = packed(outputs, inputs, kind, nested, dtype=dtype)
        exact = values(weight, state)
        errors, scale = [], 0.0
        for seed in range(20):
            generator = torch.Generator("cuda").manual_seed(seed)
            row = torch.randn(1, 1, inputs, generator=generator, device="cuda").to(dtype)
            true = row.double().view(-1) @ exact.T
            scale = max(scale, true.abs().max().item())
            errors.append([(each.view(-1) - true).abs() for each in products(row, weight, state)])
        assert_as_exact(errors, torch.finfo(dtype).eps, scale)


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shared", [None, 48 << 10, 16 << 10], ids=["usual", "less", "little"])
def test_a_row_beside_others_is_the_same(dtype, shared, monkeypatch):
    """With less shared memory, several launches compute a few rows each."""
    from bitsandbytes import matmul_4bit as matmul

    monkeypatch.setattr(kernel, "_most_shared", lambda properties: shared or 227 << 10)
    launch.reset(compiled=False)
    for outputs, inputs in SHAPES:
        weight, state = packed(outputs, inputs, dtype=dtype)
        rows = torch.randn(1, 8, inputs, device="cuda").to(dtype)
        each = [kernel.product(matmul, row, weight, state) for row in rows.split(1, 1)]
        if each[0] is None:
            assert 2 * inputs * rows.itemsize > (shared or 0), "the inputs do not fit"
            continue
        alone = torch.cat(each, 1)
        for tokens in range(2, 9):
            found = kernel.product(matmul, rows[:, :tokens], weight, state)
            assert torch.equal(found, alone[:, :tokens])
    launch.reset(compiled=False)


@pytest.mark.parametrize("nested", [True, False])
def test_the_example_has_room_for_what_bitsandbytes_reads(nested, monkeypatch):
    """Its kernel reads the maxima of four outputs at a time, also if some of them do not exist."""
    from bitsandbytes.functional import QuantState

    def original(row, weight, state):
        outputs, size = state.shape
        read = -(-outputs // 4) * 4 * size // state.blocksize
        held = state.absmax.untyped_storage().nbytes() // 4 - state.absmax.storage_offset()
        beyond.append(read - held)
        return row.new_zeros(1, outputs)

    beyond = []
    monkeypatch.setattr(kernel, "raw_stream", lambda: lambda index: 0)
    state = QuantState(
        torch.ones(1), code=torch.linspace(-1, 1, 16), blocksize=64, quant_type="nf4"
    )
    if nested:
        second = QuantState(torch.ones(1), code=torch.linspace(-1, 1, 256), blocksize=256)
        state.offset, state.state2, state.nested = torch.ones(()), second, True
    for outputs in range(5, 9):
        with pytest.raises(KernelError):  # nothing is launched
            kernel._compare(original, state, torch.bfloat16, (1, outputs, 256), print, ())
    assert len(beyond) == 4
    assert max(beyond) <= 0


@pytest.mark.cuda
@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512, 1024])
def test_blocks_and_float32(blocksize):
    import bitsandbytes

    if blocksize == 32 and Version(version("bitsandbytes")) < Version("0.49"):
        pytest.skip("this bitsandbytes has no blocks of 32 values on a GPU")
    weight, state = packed(130, 2048, "fp4", True, blocksize, dtype=torch.float32)
    row = torch.randn(1, 2048, device="cuda")
    own = kernel.product(bitsandbytes.matmul_4bit, row, weight, state)
    true = row.double() @ values(weight, state).T
    assert (own - true).abs().max() <= 4e-7 * true.abs().max() * 8


@pytest.mark.cuda
@pytest.mark.parametrize("case", ["dominant", "canceled", "subnormal", "empty blocks", "large"])
def test_errors_of_unusual_values(case):
    from bitsandbytes import functional

    errors, scale = [], 0.0
    for seed in range(20):
        torch.manual_seed(seed)
        weight = torch.randn(256, 1536, device="cuda", dtype=torch.bfloat16)
        row = torch.randn(1, 1, 1536, device="cuda", dtype=torch.bfloat16)
        if case == "dominant":
            weight[:, 5], row[..., 5] = 300, 300
        elif case == "canceled":
            row[..., 1::2] = -row[..., ::2]
            weight[:, 1::2] = weight[:, ::2]
        elif case == "subnormal":
            row *= 2.0**-130
        elif case == "empty blocks":
            weight[:, 64:640] = 0
        else:
            row *= 2.0**124
        packed_weight, state = functional.quantize_4bit(
            weight / 64, quant_type="nf4", compress_statistics=case != "empty blocks"
        )
        true = row.double().view(-1) @ values(packed_weight, state).T
        scale = max(scale, true.abs().max().item(), torch.finfo(torch.bfloat16).tiny)
        both = products(row, packed_weight, state)
        assert both[0].isfinite().all()
        errors.append([(each.view(-1) - true).abs() for each in both])
    assert_as_exact(errors, torch.finfo(torch.bfloat16).eps, scale)


@pytest.mark.cuda
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(value):
    weight, state = packed(64, 1536)
    row = torch.randn(1, 1536, device="cuda", dtype=torch.bfloat16)
    row[0, 77] = value
    own, theirs = products(row, weight, state)
    assert not own.isfinite().any()
    assert torch.equal(own.isnan(), theirs.isnan())


@pytest.mark.cuda
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_layouts(storage):
    from bitsandbytes import functional

    weight = torch.randn(96, 512, device="cuda", dtype=torch.bfloat16)
    row = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    data, state = functional.quantize_4bit(weight, quant_type="nf4", quant_storage=storage)
    plain, plain_state = functional.quantize_4bit(weight, quant_type="nf4")
    expected, _ = products(row, plain, plain_state)
    assert expected.shape == (96,)
    for each in (data, data.t()):
        found = kernel.product(None, row.view(1, 1, -1), each, state)
        assert torch.equal(found[0, 0], expected)


@pytest.mark.cuda
def test_what_the_kernel_leaves_to_bitsandbytes():
    weight, state = packed(96, 512)
    row = torch.randn(1, 512, device="cuda", dtype=torch.bfloat16)
    products(row, weight, state)
    assert kernel.product(None, row.repeat(9, 1), weight, state) is None
    assert kernel.product(None, row.clone().requires_grad_(), weight, state) is None
    assert kernel.product(None, row.double(), weight, state) is None
    assert kernel.product(None, row[:, :448], weight, state) is None
    shifted = torch.empty(513, device="cuda", dtype=torch.bfloat16)[1:]
    assert kernel.product(None, shifted, weight, state) is None
    assert kernel.product(None, nn.Parameter(row, False), weight, state) is None
    assert kernel.product(None, row.cpu(), weight, state) is None


@pytest.mark.cuda
def test_memory_is_short_for_a_while(monkeypatch):
    weight, state = packed(96, 576)
    row = torch.randn(1, 576, device="cuda", dtype=torch.bfloat16)
    launch.reset()
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "compiled", support.fails(KernelError("out of memory")))
        assert kernel.product(None, row, weight, state) is None
    products(row, weight, state)
    assert not launch.without()


# -- captured steps -------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_captured_steps_equal_eager_steps(model_dir, kind):
    model = load_model(model_dir, kind, {"": 0})
    expected = generated(model, prompt(model), eager=True)
    with gemma4_compat.disabled("one_row_4bit"):
        theirs = generated(model, prompt(model), eager=True)
    assert not torch.equal(theirs[1], expected[1]), "the kernel ran"
    for _ in range(2):
        assert_same(generated(model, prompt(model)), expected)
    assert captures(model) == 1
    with gemma4_compat.disabled("one_row_4bit"):
        assert_same(generated(model, prompt(model)), theirs)


@pytest.mark.cuda
def test_captured_steps_of_an_adapter(model_dir, adapter_dir):
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_model(model_dir, "nf4", {"": 0}), adapter_dir).eval()
    expected = generated(model, prompt(model), eager=True)
    for _ in range(2):
        assert_same(generated(model, prompt(model)), expected)


@pytest.mark.cuda
def test_streamed_layers(model_dir):
    whole = load_model(model_dir, "nf4-nested", {"": 0})
    expected = generated(whole, prompt(whole), eager=True)
    model = support.with_layers_on_the_cpu(whole, range(6))
    assert_same(generated(model, prompt(model), eager=True), expected)
    assert_same(generated(model, prompt(model)), expected)


# -- without a GPU --------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """The threads whose products are computed in the kernel; here such a product is of zeros."""
    threads = []

    def product(original, inputs, weight, state):
        threads.append(threading.get_ident())
        return inputs.new_zeros(*inputs.shape[:-1], state.shape[0])

    monkeypatch.setattr(kernel, "product", product)
    return threads


@pytest.fixture
def model(model_dir):
    return new_model(model_dir, "nf4")


def test_nothing_changes_on_the_cpu(model):
    found = one_token(model)
    with gemma4_compat.disabled("one_row_4bit"):
        assert torch.equal(one_token(model), found)


def test_only_forwards_of_a_few_tokens(model, calls):
    ids = torch.arange(5, 14)
    with torch.no_grad():
        for each in (ids[None], ids[:, None]):  # tokens of one sequence, sequences of one token
            model(input_ids=each)
            assert not calls
            model(input_ids=each[:8, :8])
            assert calls
            calls.clear()
        model(input_ids=ids[None, :1])
    assert calls
    assert set(calls) == {threading.get_ident()}
    assert not kernel.in_few_tokens()


@torch.no_grad()
def test_only_in_the_forward_of_this_thread(model, calls):
    """Meanwhile, other threads do not use the kernel."""
    layer = model.model.language_model.layers[0].mlp.up_proj
    row = torch.randn(1, 1, layer.in_features, dtype=torch.bfloat16)
    expected, found = layer(row), []

    @torch.no_grad()
    def run():
        found.append(layer(row))

    def in_another_thread(*_):
        assert kernel.in_few_tokens()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    handle = model.model.language_model.layers[1].register_forward_pre_hook(in_another_thread)
    one_token(model)
    handle.remove()
    assert torch.equal(found[0], expected)
    assert torch.equal(layer(row), expected)
    assert set(calls) == {threading.get_ident()}


def test_an_exception_ends_the_forward(model, calls):
    def fail(*_):
        raise RuntimeError("the user's")

    handle = model.model.language_model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the user's"):
        one_token(model)
    handle.remove()
    assert not kernel.in_few_tokens()
    assert calls


def test_a_forward_inside_another(model, calls):
    inner = []

    def again(*_):
        if not inner:
            inner.append(kernel.in_few_tokens())
            one_token(model)
            assert kernel.in_few_tokens() is inner[0]

    handle = model.model.language_model.layers[2].register_forward_pre_hook(again)
    one_token(model)
    handle.remove()
    assert inner == [True]
    assert not kernel.in_few_tokens()


def test_other_models(calls):
    """Another model's layers, in a thread that ran a forward of ours."""
    layer = support.linear4bit()
    model_class, config = support.config_of("Llama")
    llama = model_class(config).eval()
    llama.model.layers[0].mlp.up_proj = support.linear4bit(128, 128, compute_dtype=torch.float32)
    llama.to("cpu")
    one_token(llama)
    layer.to("cpu")(torch.randn(1, 256))
    assert not calls


def test_a_bias_and_an_output_are_left_to_bitsandbytes(calls):
    import bitsandbytes
    import transformers.models.gemma4.modeling_gemma4  # noqa: F401

    layer = support.linear4bit(bias=True).to("cpu")
    with torch.no_grad(), kernel.few_tokens():
        layer(torch.randn(1, 256, dtype=torch.bfloat16))
        assert not calls
        row, state = torch.randn(1, 256, dtype=torch.bfloat16), layer.weight.quant_state
        bitsandbytes.matmul_4bit(row, layer.weight.t(), quant_state=state)
    assert calls


@torch.no_grad()
def test_compiled_layers(calls):
    layer = support.linear4bit().to("cpu")
    row = torch.randn(1, 256, dtype=torch.bfloat16)
    expected = layer(row)
    compiled = torch.compile(lambda inputs: layer(inputs), backend="eager")
    with kernel.few_tokens():
        assert torch.equal(compiled(row), expected)
    assert not calls


def test_uninstalled(model, calls):
    with gemma4_compat.disabled("one_row_4bit"):
        one_token(model)
    assert not calls
    (status,) = [each for each in gemma4_compat.status() if each.name == "one_row_4bit"]
    assert str(status.state) == "applied"
    assert "bitsandbytes.matmul_4bit" in status.replaces


def test_disabled_for_a_model_with_hooks(model, calls):
    """A hook keeps the patch's forward."""
    import transformers.models.gemma3n.modeling_gemma3n  # noqa: F401
    from accelerate.hooks import ModelHook, add_hook_to_module

    assert str(gemma4_compat.status()["one_row_4bit"].parts["Gemma 3n"]) == "applied"
    add_hook_to_module(model.model.language_model, ModelHook())
    with gemma4_compat.disabled("one_row_4bit"):
        one_token(model)
        assert not calls
    one_token(model)
    assert calls


def test_a_layer_that_does_not_call_matmul_4bit(monkeypatch):
    from bitsandbytes.nn import modules

    monkeypatch.setattr(modules.Linear4bit, "forward", lambda self, x: x)
    finding = patch.PATCH.probe_function()
    assert finding.verdict.name == "DRIFTED"
    assert "matmul_4bit" in finding.reason


def test_a_release_with_another_way(monkeypatch):
    from bitsandbytes.autograd import _functions

    monkeypatch.setattr(_functions, "matmul_4bit", lambda A, B, quant_state: A @ B)
    assert patch.PATCH.probe_function().verdict.name == "FIXED"


@pytest.mark.regression("one_row_4bit", r"bitsandbytes multiplies one row")
def test_who_multiplies_of_gemma3n(monkeypatch):
    model = quantized(make(kind="gemma3n"), dtype=torch.float32, device="cpu")
    assert_not_by_bitsandbytes(model, monkeypatch)


@pytest.mark.cuda
@pytest.mark.regression("one_row_4bit", r"the products are not exact")
def test_forward_of_one_token_of_gemma3n():
    assert_more_exact(quantized(make(kind="gemma3n")))


@pytest.mark.regression("one_row_4bit", r"bitsandbytes multiplies one row")
def test_who_multiplies_of_unified(monkeypatch):
    model = quantized(make(kind="unified"), dtype=torch.float32, device="cpu")
    assert_not_by_bitsandbytes(model, monkeypatch)


@pytest.mark.cuda
@pytest.mark.regression("one_row_4bit", r"the products are not exact")
def test_forward_of_one_token_of_unified():
    assert_more_exact(quantized(make(kind="unified")))
