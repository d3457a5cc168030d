"""Whether a kernel runs: it is compiled, compared with the original, and off after a failure."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

import gemma4_compat
from gemma4_compat.runtime.kernels import (
    compiler,
    decoder_layer,
    launch,
    one_row_4bit,
    one_row_lora,
    one_token_attention,
    rms_norm_launch,
    rotary,
    token_loss,
)  # fmt: skip
from gemma4_compat.runtime.kernels.compiler import KernelError
from gemma4_compat.runtime.kernels.trials import require_equal, require_near
from tests import support

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def anew():
    launch.reset()
    gemma4_compat.install("fast")
    yield
    gemma4_compat.uninstall("fast")
    launch.reset()


@pytest.fixture
def family(monkeypatch):
    monkeypatch.setattr(launch, "_launchers", [])
    return launch.Launcher("own", "PyTorch computes", most=8)


def counted(function):
    def make(*args):
        make.calls += 1
        return function(*args)

    make.calls = 0
    return make


@pytest.mark.parametrize("through", ["get", "checked"])
@pytest.mark.parametrize(
    "error",
    [
        KernelError("NVRTC: no such architecture\nline 2"),
        FileNotFoundError(2, "No such file", "one_row_4bit.cu"),
        OSError("libcuda.so.1"),
        ValueError("anything"),
        RuntimeError("an illegal memory access was encountered"),
        AttributeError("a private name is gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_turns_the_kind_off(family, caplog, error, through):
    """Once: nothing is tried again, and one line says so."""
    make = counted(support.fails(error))
    arguments = (make,) if through == "get" else (family.checked, "key", CPU, make)
    with caplog.at_level("INFO"):
        for kind in ("first", "first", "first"):
            assert family.get(kind, CPU, *arguments) is None
        assert family.kinds == {"first": None}
        assert make.calls == 1
        assert family.get("second", CPU, *arguments) is None
    assert make.calls == (2 if through == "get" else 1)
    [line] = launch.without()
    assert [record.getMessage() for record in caplog.records] == [line]
    assert line.startswith("on cpu, PyTorch computes, not the kernel own, for inputs of one kind")
    assert str(error).splitlines()[0] in line
    assert "line 2" not in line
    family.get("third", torch.device("meta"), make)
    assert len(launch.without()) == 2, "one line for each GPU"


@pytest.mark.parametrize("through", ["get", "checked"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        KernelError("out of memory"),
        MemoryError(),
        RuntimeError("operation not permitted when stream is capturing"),
        KernelError("invalid device context"),
    ],
    ids=str,
)
def test_a_failure_that_may_pass_is_tried_again(family, caplog, error, through):
    failing = counted(support.fails(error))
    with caplog.at_level("INFO"):
        for _ in range(2):
            arguments = (failing,) if through == "get" else (family.checked, "key", CPU, failing)
            assert family.get("kind", CPU, *arguments) is None
        assert failing.calls == 2
        assert family.get("kind", CPU, lambda: "launcher") == "launcher"
    assert not caplog.records
    assert not launch.without()


def test_errors_of_the_user(family):
    """Those of a signal's handler, for example."""

    def limit():
        raise TimeoutError("the user's")

    def interrupt():
        raise KeyboardInterrupt

    for make, error in ((limit, TimeoutError), (interrupt, KeyboardInterrupt)):
        with pytest.raises(error):
            family.get("kind", CPU, make)
        with pytest.raises(error):
            family.checked("key", CPU, make)
    assert not family.kinds
    assert family.checked("key", CPU, lambda: 3) == 3


def test_a_launch_that_the_driver_refuses(family, caplog):
    with caplog.at_level("INFO"):
        assert family.get("kind", CPU, family.checked, "key", CPU, lambda: "launcher") == "launcher"
        for _ in range(2):
            error = KernelError("too many resources requested for launch")
            assert family.failed("kind", CPU, error, "key") is None
    assert family.get("kind", CPU, pytest.fail) is None
    assert family.get("another", CPU, family.checked, "key", CPU, pytest.fail) is None
    assert len(caplog.records) == 1


def test_what_is_not_meant_for_the_kernel(family):
    """A dtype that it does not know is no failure."""
    make = counted(lambda: None)
    for _ in range(2):
        assert family.get("kind", CPU, family.checked, "key", CPU, make) is None
    assert make.calls == 1
    assert not launch.without()


def test_a_comparison_does_not_disturb(family):
    """It runs without gradients and autocast, and leaves both as they were."""
    seen = []

    def make():
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return 1

    with torch.autocast("cpu", torch.bfloat16):
        family.checked("key", CPU, make)
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert seen == [(False, False)]


def test_a_capture_compares_nothing(family, monkeypatch):
    monkeypatch.setattr(launch, "is_capturing", lambda device: True)
    arguments = family.checked, "key", CPU, lambda: "launcher"
    assert family.get("kind", CPU, *arguments) is None
    monkeypatch.undo()
    assert family.get("kind", CPU, *arguments) == "launcher"
    monkeypatch.setattr(launch, "is_capturing", lambda device: True)
    assert family.get("another", CPU, *arguments) == "launcher", "what is known is used"


def test_the_number_of_kinds_is_limited(family):
    """The oldest are dropped."""
    for kind in range(1000):
        assert family.get(kind, CPU, lambda: "launcher") == "launcher"
        assert len(family.kinds) <= 8
        assert set(family.kinds) == set(range(max(0, kind + 1 - len(family.kinds)), kind + 1))
    assert len(family.kinds) >= 7


def test_threads(family, caplog):
    """Each gets its launcher while others drop kinds, and one line tells a failure."""
    wrong, failing = [], support.fails(KernelError("no NVRTC"))

    def run(number):
        try:
            for turn in range(3000):
                kind = (number * turn) % 20
                if family.get(kind, CPU, lambda kind=kind: -kind or "zero") != (-kind or "zero"):
                    wrong.append(kind)
                if turn % 20 == 0:  # to ask whose error it is takes a while
                    family.get(("failing", turn), CPU, failing)
        except BaseException as error:
            wrong.append(error)

    in_threads(run, caplog)
    assert not wrong
    assert len(caplog.records) == 1


def in_threads(run, caplog):
    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 5)]
    try:
        sys.setswitchinterval(1e-6)
        with caplog.at_level("INFO"):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)


def test_layouts_that_another_thread_drops():
    """A table may lose its entries at each look: here, whenever a layout is hashed."""
    table = one_token_attention.LAUNCHER.kinds

    class Dropping(type(torch.Tensor)):
        def __hash__(cls):
            table.clear()
            return 1

    class Keys(torch.Tensor, metaclass=Dropping):
        pass

    keys = torch.zeros(1, 1, 10, 32).as_subclass(Keys)
    for _ in range(3):
        query = torch.zeros(1, 1, 1, 32)
        assert one_token_attention.attention(query, keys, keys, None, 1.0) is None
    assert not launch.without(), "the kernel is not meant for the CPU"


@pytest.mark.parametrize(
    ("ours", "theirs", "passes"),
    [
        (0.001, 0.001, True), (0.0014, 0.001, True), (0.0017, 0.001, False), (1e-7, 0.0, True),
        (1e-3, 0.0, False), (float("nan"), 0.001, False), (float("nan"), float("nan"), False),
    ],
)  # fmt: skip
def test_errors_that_are_near(ours, theirs, passes):
    exact = torch.ones(1000, dtype=torch.float64)
    found, original = exact * (1 + ours), exact * (1 + theirs)
    if passes:
        return require_near(found, original, exact)
    with pytest.raises(KernelError, match="relative error"):
        require_near(found, original, exact)


def test_equal_bits():
    require_equal(torch.ones(3), torch.ones(3))
    with pytest.raises(KernelError, match="differ"):
        require_equal(torch.ones(3), torch.ones(3) + 2**-23)


def test_a_source_that_is_missing(monkeypatch, tmp_path):
    """As in a frozen application: PyTorch computes the loss."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(token_loss, "_FILE", tmp_path / "token_loss.cu")
    for _ in range(2):
        assert not token_loss.can_compute(GPU, torch.float32, 512)
    [line] = launch.without()
    assert line in gemma4_compat.status().notes


# -- on a GPU -------------------------------------------------------------------------------------


def norms():
    from tests.runtime.test_rms_norm import Norm, norm_of, original

    assert Norm.forward is not original
    module, inputs = norm_of(1536), torch.randn(3, 1536, device=GPU, dtype=torch.bfloat16)
    return module(inputs), original(module, inputs)


def sums():
    from tests.runtime.test_rms_norm import modeling, norm_of

    norm, following = (norm_of(1536, torch.bfloat16, modeling.Gemma4RMSNorm) for _ in range(2))
    x, residual = torch.randn(2, 1, 1536, device=GPU, dtype=torch.bfloat16)
    scalar = torch.full((1,), 0.7, device=GPU, dtype=torch.bfloat16)
    right = (residual + norm(x)) * scalar
    own = decoder_layer.added(norm, x, residual, scalar, following)
    return torch.stack(own), torch.stack([right, following(right)])


def activations():
    from transformers.activations import ACT2FN

    act, (x, other) = ACT2FN["gelu_pytorch_tanh"], torch.randn(2, 3, 1536, device=GPU).bfloat16()
    return decoder_layer.gated(act, x, other), act(x) * other


def gradients():
    from tests.runtime.test_rms_norm import norm_of, original

    module = norm_of(256).requires_grad_(False)
    inputs = torch.randn(2, 7, 3, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(2, 3, 7, 256, device=GPU, dtype=torch.bfloat16).transpose(1, 2)
    with torch.enable_grad():
        found = module(inputs), original(module, inputs)
        return tuple(torch.autograd.grad(out, inputs, grad)[0] for out in found)


def rotations():
    from tests.runtime.test_rotary import held, inputs_of

    inputs = inputs_of((1, 3, 8, 256), torch.bfloat16)
    return rotary.in_one_kernel(held.original)(*inputs, 2), held.original(*inputs, 2)


def products(nested=True, dtype=torch.bfloat16):
    import bitsandbytes

    from tests.patches.test_one_row_4bit import packed

    original = bitsandbytes.matmul_4bit
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__
    weight, state = packed(700, 1536, nested=nested, dtype=dtype)
    row = torch.randn(1, 1536, device=GPU, dtype=dtype)
    with one_row_4bit.few_tokens():
        found = one_row_4bit.matmul(original, row, weight.t(), state)
    return found, original(row, weight.t(), state)


def updates():
    from tests.patches.test_one_row_lora import inputs_of, layer_of

    layer = layer_of(300, 1536)
    row, _ = inputs_of(layer)
    with one_row_4bit.few_tokens(), gemma4_compat.disabled("one_row_lora"):
        theirs = layer(row)
    with one_row_4bit.few_tokens():
        return layer(row), theirs


def attentions(length=200):
    from tests.runtime.test_one_token_attention import by_pytorch, inputs

    each = inputs((8, 1, 256), length, torch.bfloat16, 0)
    theirs = by_pytorch(*each)
    own = one_token_attention.attention(*each, 1.0)
    return theirs if own is None else own, theirs


def losses():
    from tests.runtime.test_token_loss import IGNORED, example, whole

    logits, target = example(torch.bfloat16)
    with torch.enable_grad():
        _, theirs = whole(logits, target, 30.0)
    if not token_loss.can_compute(GPU, logits.dtype, logits.shape[-1]):
        return theirs, theirs
    token_loss.losses_(logits, target, 30.0, IGNORED)
    return logits, theirs


def experts():
    from gemma4_compat.runtime.experts import kernel
    from gemma4_compat.runtime.experts.packed import Packed
    from tests.patches.test_fused_experts_4bit import FUSED, routed_wide, wide

    module = wide("nf4-nested", dtype=torch.bfloat16)
    states, chosen, weights = routed_wide(2, torch.bfloat16)
    packed = {name: Packed(getattr(module, name), states.dtype) for name in FUSED}
    own = kernel.routed(module, packed, states, chosen, weights)
    nothing = torch.zeros(1, device=GPU)
    return nothing if own is None else own, nothing


#: Of each kernel: the module, a function that returns the results with and without it, and lines
#: that make the kernel plainly wrong.
CASES = {
    "rms_norm": (rms_norm_launch, norms, [
        ("factor), eps)", "factor * 1.01f), eps)"), ("i < fours;", "i < fours - 1;"),
    ]),
    "rms_norm_gradient": (rms_norm_launch, gradients, [
        ("-0.5f, powf", "-0.51f, powf"), ("row % heads) * tokens", "row % heads) * heads"),
    ]),
    "rms_norm_sum": (rms_norm_launch, sums, [
        ("__fadd_rn(old", "__fadd_rn(2.f * old"), ("scalar->get()", "1.f"),
        ("next_weight + i", "weight + i"), ("(others, factor", "(squares, factor"),
    ]),
    "gated": (decoder_layer, activations, [
        ("0.044715f", "0.0448f"), ("at >= fours", "at >= fours - 1"),
    ]),
    "rotary": (rotary, rotations, [
        ("-two.values[j].get()", "two.values[j].get()"), ("2 * (row /", "0 * (row /"),
    ]),
    "one_row_4bit": (one_row_4bit, products, [
        ("i / 32] * SCALE", "i / 32] * SCALE * 1.05f"),
        ("vector + i * step >= all.vectors) break", "vector + i * step >= all.vectors - 1) break"),
        ("at >> all.shift", "at >> all.shift & ~1u"),
        ("all.maxima2[block >> 8]", "all.maxima2[0]"),
        ("if (row - part * ROWS >= all.outputs) return;", "return;"),
    ]),
    "one_row_lora": (one_row_lora, updates, [
        ("fmaf(scaling, sum", "fmaf(scaling * 1.05f, sum"),
        ("PARTS * 32 >= fours) break", "PARTS * 32 >= fours - 1) break"),
        ("if (first >= outputs) return;", "return;"),
    ]),
    "one_token_attention": (one_token_attention, attentions, [
        ("scores[0] * scale", "scores[0] * scale * 1.05f"),
        ("min(range, length - first)", "min(range, length - first - 1)"),
        ("factor * split.y", "split.y"),
        ("* key_head;", "* 0;"),
    ]),
    "token_loss": (token_loss, losses, [
        ("1.0f - tangent * tangent", "1.0f - tangent"),
        ("i < packs;", "i < packs - 1;"),
        ("capped(load(pack.values[k]), cap", "capped(load(pack.values[k]), cap * 1.01f"),
    ]),
    "routed_experts": (None, experts, [
        ("0.044715f", "0.144715f"), ("routing[token * TOP_K + i] *", ""),
        ("min(UNITS - 2 * first", "min(UNITS - 1 - 2 * first"),
        ("(unit + second) / BLOCK", "unit / BLOCK"),
    ]),
}  # fmt: skip


#: Their results equal those of PyTorch's kernels.
EXACT = {"rms_norm", "rms_norm_gradient", "rms_norm_sum", "gated", "rotary"}


def module_of(name):
    from gemma4_compat.runtime.experts import kernel

    return CASES[name][0] or kernel


@pytest.mark.cuda
@pytest.mark.parametrize("captured", [False, True])
@torch.no_grad()
def test_a_kernel_waits_for_the_one_before_it(captured):
    """It begins early, but reads what the other one has written."""
    from tests.runtime.test_rms_norm import norm_of, original

    norm, inputs = norm_of(1536), torch.randn(8, 1 << 15, 1536, device=GPU, dtype=torch.bfloat16)
    x, graph = inputs[0].clone(), torch.cuda.CUDAGraph()

    def run(one=norm):
        out = x
        for _ in range(4):
            out = one(out)
        return out

    expected = []
    for each in inputs:
        x.copy_(each)
        expected.append(run(lambda values: original(norm, values)))
    run()
    if captured:
        with torch.cuda.graph(graph):
            out = run()
    for each, right in zip(inputs, expected, strict=True):
        x.copy_(each)
        if captured:
            graph.replay()
        else:
            out = run()
        assert torch.equal(out, right)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_first_call(name, capsys):
    """The kernel runs.  How long its comparison takes is printed."""

    def timed():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        outputs = CASES[name][1]()
        torch.cuda.synchronize()
        return time.perf_counter() - begin, outputs

    CASES[name][1]()  # libraries load their kernels
    launch.reset()
    first, (own, theirs) = timed()
    launch.reset(compiled=False)
    compared, _ = timed()
    again, _ = timed()
    with capsys.disabled():
        print(f"\n{name}: {first:.3f} s with the compiler, {compared - again:.3f} s to compare")
    assert not launch.without()
    assert module_of(name).LAUNCHER.kinds
    assert torch.equal(own, theirs) == (name in EXACT), "another kernel ran"


def check_without(name, why):
    own, theirs = CASES[name][1]()
    assert torch.equal(own, theirs)
    [line] = [
        line for line in launch.without() if f"kernel {module_of(name).LAUNCHER.name}," in line
    ]
    assert why in line
    own, theirs = CASES[name][1]()
    assert torch.equal(own, theirs)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name, case in CASES.items() for n in range(len(case[2]))]
)
@torch.no_grad()
def test_a_wrong_kernel_is_refused(name, number, monkeypatch, tmp_path):
    module, (right, wrong) = module_of(name), CASES[name][2][number]
    source = module._FILE.read_text()
    assert right in source
    for header in module._FILE.parent.glob("*.cuh"):
        (tmp_path / header.name).write_text(header.read_text())
    file = tmp_path / module._FILE.name
    file.write_text(source.replace(right, wrong))
    monkeypatch.setattr(module, "_FILE", file)
    check_without(name, "differ" if name in EXACT else "")


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_missing_source_or_compiler(name, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(module_of(name), "_FILE", tmp_path / "missing.cu")
        check_without(name, "FileNotFoundError")
    launch.reset()
    monkeypatch.setattr(compiler, "_nvrtc", support.fails(KernelError("libnvrtc.so.12")))
    check_without(name, "libnvrtc.so.12")


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_what_a_comparison_leaves_alone(name, monkeypatch, capsys):
    """The states of the random numbers, and most of the memory."""
    family, used, seen = module_of(name).LAUNCHER, [], []
    checked = family.checked

    def compare(*arguments):
        torch.cuda.reset_peak_memory_stats()
        before, memory = (torch.cuda.get_rng_state(), torch.get_rng_state()), memory_now()
        result = checked(*arguments)
        after = torch.cuda.get_rng_state(), torch.get_rng_state()
        seen.append(all(map(torch.equal, before, after)))
        used.append(torch.cuda.max_memory_allocated() - memory)
        return result

    memory_now = torch.cuda.memory_allocated
    CASES[name][1]()  # cuBLAS allocates its workspace
    launch.reset(compiled=False)
    monkeypatch.setattr(family, "checked", compare)
    CASES[name][1]()
    with capsys.disabled():
        print(f"\n{name}: {max(used) / 2**20:.1f} MiB")
    assert all(seen)
    assert max(used) < 24 << 20
