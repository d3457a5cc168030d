"""An RMS norm in one kernel equals that of transformers bit for bit."""

from __future__ import annotations

import copy
import ctypes
import pickle
import struct
import threading
from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gemma4_compat.runtime.kernels import compiler, launch, rms_norm, rms_norm_launch
from gemma4_compat.runtime.kernels.rms_norm import in_one_kernel
from tests import support

modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")

#: Sizes of hidden states, per-layer inputs and heads in all models of the family, and limits.
SIZES = [128, 132, 256, 512, 640, 768, 1024, 1152, 1536, 2048, 2560, 2816, 3840, 5376, 7680]
ROWS = [
    *range(1, 71), 127, 128, 129, 130, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 4096,
    8192, 65537,
]  # fmt: skip
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: Of the inputs, and of the weight.
DTYPES = [(F32, F32), (F32, None), (BF16, BF16), (BF16, None), (BF16, F32), (F16, F16), (F16, F32)]
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")

original = modeling.Gemma4RMSNorm.forward
original = getattr(original, "__wrapped__", original)


class Norm(modeling.Gemma4RMSNorm):
    forward = in_one_kernel(original)


def norm_of(size, weight=F32, cls=Norm, device="cuda:0"):
    module = cls(size, with_scale=weight is not None)
    if weight is not None:
        torch.nn.init.normal_(module.weight)
        module.weight.data = module.weight.data.to(weight)
    return module.to(device)


@pytest.fixture
def used(monkeypatch):
    """The number of rows of each launch, except in comparisons."""
    seen, compare = [], rms_norm._equal_kind

    def comparing(*args):
        kind = compare(*args)
        if kind is not None:
            launch = kind.launch

            def launching(*arguments):
                seen.append(arguments[-1])
                return launch(*arguments)

            kind.launch = launching
        return kind

    launch.reset(compiled=False)
    monkeypatch.setattr(rms_norm, "_equal_kind", comparing)
    yield seen
    launch.reset(compiled=False)


def check(module, inputs):
    """The outputs with and without the kernel are equal."""
    with torch.no_grad():
        expected, output = original(module, inputs), module(inputs)
    assert (output.dtype, output.stride()) == (expected.dtype, expected.stride())
    equal = torch.equal(output, expected) or torch.equal(
        output.nan_to_num(7), expected.nan_to_num(7)
    )
    assert equal, (inputs.shape, inputs.dtype)


@pytest.mark.cuda
@pytest.mark.whole_gpu
@pytest.mark.parametrize("size", SIZES)
def test_output_equals_that_of_transformers(size, used):
    for dtype, weight in DTYPES:
        module = norm_of(size, weight=weight)
        values = torch.randn(max(ROWS), size, device="cuda")
        for scale in (1, 1e-4, 1e3):
            scaled = (scale * values).to(dtype)
            for rows in ROWS if scale == 1 else (1, 3, 4, 8, 20):
                used.clear()
                check(module, scaled[:rows])
                assert used == [rows], (dtype, weight)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(512,), (1, 1, 512), (3, 1, 16, 512), (2, 5, 7, 512)], ids=str)
def test_shapes(shape, used):
    check(norm_of(512), torch.randn(shape, device="cuda", dtype=BF16))
    assert len(used) == 1


@pytest.mark.cuda
def test_more_values_than_32_bits_can_count(used):
    """PyTorch then splits the rows, and computes its factor from rounded numbers."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB")
    rows = (1 << 21) + 3
    check(norm_of(256, BF16), torch.randn(rows, 256, device="cuda", dtype=BF16))
    assert used == [rows]
    most = (1 << 24) // 33
    inputs = torch.randn(most + 1, 132, device="cuda")
    for rows in (most, most + 1):
        check(norm_of(132), inputs[:rows])
    assert used[1:] == [most]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "inputs",
    [
        torch.zeros(1, 1536),
        torch.full((1, 1536), 1e30),
        torch.full((1, 1536), 1e-30),
        torch.tensor([[float("inf")] + [1.0] * 1535]),
        torch.tensor([[float("nan")] + [1.0] * 1535]),
    ],
    ids=["zeros", "overflow", "underflow", "infinite", "NaN"],
)
def test_extreme_inputs(inputs, used):
    for rows in (1, 33):
        check(norm_of(1536, BF16), inputs.to("cuda", BF16).repeat(rows, 1))
    assert used == [1, 33]


@pytest.mark.cuda
def test_what_the_kernel_cannot_compute(used):
    module, wide = norm_of(1536), torch.randn(4, 1, 3072, device="cuda")
    narrow = norm_of(1536)
    narrow.weight.data = torch.randn(1537, device="cuda")[1:]
    check(module, wide[..., :1536])  # not contiguous
    check(module, wide[0, 0, 1:1537])  # not aligned
    check(narrow, wide[0, 0, :1536])
    check(norm_of(8192, cls=Norm), torch.randn(64, 8192, device="cuda"))
    check(norm_of(130), torch.randn(2, 130, device="cuda"))
    check(norm_of(64), torch.randn(2, 64, device="cuda"))
    check(module, torch.empty(0, 1536, device="cuda"))
    check(norm_of(256), torch.randn(3, 256, device="cuda", dtype=torch.float64))
    check(norm_of(256, None), torch.tensor(2.0, device="cuda"))
    assert not used


@pytest.mark.cuda
def test_gradients_and_modes(used):
    from torch.autograd import forward_ad
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    module, inputs = norm_of(1536), torch.randn(4, 1536, device="cuda")
    check(module, inputs)
    used.clear()
    assert module(inputs).requires_grad
    with torch.no_grad():
        with torch.autocast("cuda"):
            check(module, inputs)
        for mode in (Functions, Operators):
            seen = []
            with mode():
                module(inputs)
            assert len(seen) > 5
        assert torch.equal(torch.vmap(module)(inputs[:, None])[:, 0], module(inputs))
        assert used == [4]
        used.clear()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(inputs, inputs)
            assert forward_ad.unpack_dual(module(dual)).tangent is not None
        traced = torch.jit.trace(module, inputs, check_trace=False)
        assert torch.equal(traced(2 * inputs), original(module, 2 * inputs))
        negative = torch._neg_view(inputs)
        assert torch.equal(module(negative), original(module, -inputs))
        assert not used
        with torch.device("cuda"):  # as with torch.set_default_device
            check(module, inputs)
        with torch.inference_mode():
            check(module, torch.randn(4, 1536, device="cuda"))
    assert used == [4, 4]


def compiled_norm(device):
    module, inputs = norm_of(256, device=device), torch.randn(4, 256, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: module(x) + 1, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(inputs), original(module, inputs) + 1)


def test_torch_compile_without_a_gpu():
    compiled_norm("cpu")


@pytest.mark.cuda
def test_torch_compile(used):
    compiled_norm("cuda")
    assert not used


class OffsetNorm(Norm):
    """As in Gemma 2."""

    def _norm(self, hidden_states):
        return super()._norm(hidden_states) + 1


class PropertyNorm(Norm):
    @property
    def weight(self):
        if "weight" not in self._parameters:
            raise AttributeError
        return 2 * self._parameters["weight"]


class ScaledNorm(Norm):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.cuda
def test_norms_of_users(used):
    inputs = torch.randn(3, 1536, device="cuda", dtype=BF16)
    for cls in (OffsetNorm, PropertyNorm):
        check(norm_of(1536, cls=cls), inputs)
    module = norm_of(1536)
    module._norm = lambda x: x
    check(module, inputs)
    module = norm_of(1536)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Tanh())
    check(module, inputs)
    assert not used
    module = norm_of(1536, cls=ScaledNorm)
    with torch.no_grad():
        assert torch.equal(module(inputs), 2 * original(module, inputs))
    assert used == [3]
    module = norm_of(1536)
    check(module, inputs)
    module.eps = 0.5
    check(module, inputs)
    seen = []
    module.register_forward_hook(lambda *args: seen.append(args))
    check(module, inputs)
    assert used == [3] * 4
    assert len(seen) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Norm, "_norm", lambda self, x: x)
        check(module, inputs)
    assert used == [3] * 4


@pytest.mark.cuda
def test_a_capture_compares_nothing():
    launch.reset()
    module, inputs = norm_of(1536), torch.randn(1, 1536, device="cuda")
    for kernels in (9, 1):
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            with torch.cuda.graph(graph):
                output = module(inputs)
            expected = original(module, inputs)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            graph.replay()
            torch.cuda.synchronize()
        names = [e.name for e in profiled.events() if e.device_type.name == "CUDA"]
        assert ("rms_norm" in names) == (kernels == 1), names
        assert len(names) <= kernels
        assert torch.equal(output, expected)
        check(module, inputs)


@pytest.mark.cuda
def test_random_numbers_of_the_user(used):
    module, inputs = norm_of(2816), torch.randn(1, 2816, device="cuda")
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    check(module, inputs)
    after = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert all(map(torch.equal, before, after))
    assert used == [1]


@pytest.mark.cuda
def test_threads_and_streams(used):
    module, wrong = norm_of(1536), []
    inputs = [torch.randn(rows, 1536, device="cuda") for rows in (1, 5, 40)]
    with torch.no_grad():
        expected = [original(module, each) for each in inputs]
    for each in inputs:
        check(module, each)
    used.clear()
    torch.cuda.synchronize()

    def run():
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                for each, right in zip(inputs, expected, strict=True):
                    if not torch.equal(module(each), right):
                        wrong.append(each)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(used) == 4 * 200 * 3


def test_comparisons_that_fail(monkeypatch):
    """The norm stays as it is, here of tensors that count as those of a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(rms_norm, "plain", lambda gradients=False: lambda tensor: not gradients)
    monkeypatch.setattr(rms_norm, "as_current", nullcontext)
    monkeypatch.setattr(rms_norm, "raw_stream", lambda: lambda index: 0)
    monkeypatch.setattr(Norm, "forward", in_one_kernel(original))
    launch.reset()
    tried, fail = [], support.fails(compiler.KernelError("no NVRTC"))
    monkeypatch.setattr(compiler, "compiled", lambda *args, **options: tried.append(args) or fail())
    module, inputs = norm_of(256, device="cpu"), torch.randn(2, 256)
    for _ in range(3):
        check(module, inputs)
    assert len(tried) == 2, "once for each order of additions"
    assert len(launch.without()) == 1
    monkeypatch.undo()
    launch.reset()


@pytest.mark.parametrize("size", [128, 256, 640, 1536, 7680])
def test_classes_of_rows(size):
    """More rows have the order of the power of two below them, and of the most rows."""
    for rows in (*range(1, 600), 1000, 70_000):
        few = 1 << (min(rows, rms_norm_launch.MANY_ROWS).bit_length() - 1)
        assert rms_norm_launch._threads(rows, size // 4) == rms_norm_launch._threads(few, size // 4)


def test_output_without_a_gpu():
    module, inputs = norm_of(128, device="cpu"), torch.randn(2, 128)
    check(module, inputs)
    assert module(inputs).requires_grad
    with pytest.raises(TypeError):
        module()
    with pytest.raises(TypeError):
        module(inputs, inputs)
    assert torch.equal(module(hidden_states=inputs), original(module, inputs))


def copies(module):
    return copy.deepcopy(module), pickle.loads(pickle.dumps(module))


@pytest.mark.cuda
def test_copies():
    module, inputs = norm_of(256), torch.randn(2, 256, device="cuda")
    check(module, inputs)
    own = set(vars(module))
    for copied in copies(module):
        assert set(vars(copied)) == own
        check(copied, inputs)


@pytest.mark.parametrize("is_early", [False, True])
def test_launches_reuse_their_memory(monkeypatch, is_early):
    """Also if several run at once: each has its own."""
    launched, inside, places = [], [], set()

    class Driver:
        def cuLaunchKernelEx(self, config, function, pointers, extra):
            blocks, *rest = struct.unpack_from("7IPPI", config)
            if blocks == 1 and not inside:
                inside.append(1)
                run(2, 1 << 40, 5, 6)
            *sizes, stream, attributes, count = rest
            assert (sizes, stream, count) == ([1, 1, 32, 4, 1, 0], 1 << 40, is_early)
            attribute = [ctypes.c_int.from_address(attributes + 4 * i).value for i in range(3)]
            assert attribute == [6, 0, 1]  # programmatic stream serialization
            places.add(pointers[0])
            values = [ctypes.c_int64.from_address(pointers[i]).value for i in range(2)]
            number = ctypes.c_int.from_address(pointers[2]).value
            launched.append((*values, number, ctypes.c_float.from_address(pointers[3]).value))
            return 0 if blocks < 3 else 1

        def cuGetErrorString(self, result, text):
            return 0

    monkeypatch.setattr(compiler, "driver", Driver)
    kernel = compiler.Kernel(None, None, 0, is_early)
    run = compiler.launcher(kernel, 2, (7, 0.5), (32, 4), early=True)
    run(1, 1 << 40, 1 << 41, 3)
    with pytest.raises(compiler.KernelError, match="unknown CUDA error"):
        run(3, 1 << 40, 8, 9)
    assert launched == [(5, 6, 7, 0.5), (1 << 41, 3, 7, 0.5), (8, 9, 7, 0.5)]
    assert len(places) == 2
