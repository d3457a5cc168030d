"""The RMS norms of a captured step equal those of transformers bit for bit, in one kernel each."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gemma4_compat.runtime.kernels import rms_norm
from gemma4_compat.runtime.kernels.rms_norm import norm_calls
from gemma4_compat.runtime.kernels.step import in_step

modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")

#: Widths of hidden states, per-layer inputs and heads in E2B, E4B, 26B-A4B and 31B; and 128.
WIDTHS = [128, 256, 512, 1536, 2560, 2816, 5376]
ROWS = [(1, 1), (1, 1, 8), (1, 1, 2), (3, 1, 16), (64,)]


def norm_of(width, weight=torch.float32, cls=None, device="cuda:0"):
    module = (cls or modeling.Gemma4RMSNorm)(width, with_scale=weight is not None)
    if weight is not None:
        torch.nn.init.normal_(module.weight)
        module.weight.data = module.weight.data.to(weight)
    return module.to(device)


def norms_in_one_kernel(modules):
    return in_step({}, norm_calls(modules))


def captured(module, inputs):
    """The output of a captured call, and the kernels in it."""
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), norms_in_one_kernel([module]) as step:
        module(inputs)
        assert step.failure is None
        with torch.cuda.graph(graph):
            output = module(inputs)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    launched = [e.name for e in profiled.events() if e.device_type.name == "CUDA"]
    return output, launched


@pytest.mark.cuda
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_output_equals_that_of_transformers(width, rows):
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for dtype, weight in ((d, w) for d in dtypes for w in {None, d, torch.float32}):
        module = norm_of(width, weight=weight)
        for scale in (1e-4, 1, 1e3):
            inputs = (scale * torch.randn(*rows, width, device="cuda")).to(dtype)
            with torch.no_grad():
                expected = module(inputs)
            output, launched = captured(module, inputs)
            assert launched == ["rms_norm"], (dtype, weight)
            assert torch.equal(output, expected), (dtype, weight, scale)
            assert output.dtype == expected.dtype


class AnotherMean(torch.nn.Module):
    """The same norm, computed with other roundings."""

    def __init__(self, width, with_scale):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        wide = x.float()
        mean = wide.view(*x.shape[:-1], 2, -1).pow(2).mean(-1).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean + self.eps) * self.weight).type_as(x)


class AnotherMeanRMSNorm(AnotherMean):
    pass


class OffsetRMSNorm(modeling.Gemma4RMSNorm):
    """As in Gemma 2."""

    def forward(self, x):
        return (self._norm(x.float()) * (1 + self.weight.float())).type_as(x)


@pytest.mark.cuda
@pytest.mark.parametrize("cls", [AnotherMean, AnotherMeanRMSNorm, OffsetRMSNorm])
def test_other_norms_stay_as_they_are(cls):
    module = norm_of(1536, cls=cls)
    inputs = torch.randn(1, 1536, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = module(inputs)
    output, launched = captured(module, inputs)
    assert "rms_norm" not in launched
    assert torch.equal(output, expected)


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
def test_extreme_inputs(inputs):
    inputs = inputs.to("cuda", torch.bfloat16)
    module = norm_of(1536, weight=torch.bfloat16)
    with torch.no_grad():
        expected = module(inputs)
    output, launched = captured(module, inputs)
    assert launched == ["rms_norm"]
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.cuda
def test_what_one_kernel_cannot_compute():
    module = norm_of(1536)
    wide = torch.randn(4, 1, 3072, device="cuda")
    for inputs in (wide[..., :1536], wide[0, 0, 1:1537]):  # not contiguous; not aligned
        with torch.no_grad():
            expected = module(inputs)
        output, launched = captured(module, inputs)
        assert "rms_norm" not in launched
        assert torch.equal(output, expected)
    with torch.autocast("cuda"):
        assert rms_norm._signature(module, wide) is None
    with torch.enable_grad():
        assert rms_norm._signature(module, wide) is None


class ScaledRMSNorm(modeling.Gemma4RMSNorm):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.cuda
def test_settings_of_a_norm():
    inputs = torch.randn(1, 1536, device="cuda")
    for scale in (1.0, 2.0, 1.0):
        module = norm_of(1536, cls=ScaledRMSNorm)
        module.scale = scale
        with torch.no_grad():
            expected = module(inputs)
        output, launched = captured(module, inputs)
        assert (launched == ["rms_norm"]) == (scale == 1.0)
        assert torch.equal(output, expected)
    module.register_buffer("shift", torch.zeros(1536, device="cuda"))
    assert "rms_norm" not in captured(module, inputs)[1]


@pytest.mark.cuda
def test_random_numbers_of_the_user():
    module, inputs = norm_of(2816), torch.randn(1, 2816, device="cuda")
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert captured(module, inputs)[1] == ["rms_norm"]
    after = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert all(map(torch.equal, before, after))


def forwards(model):
    """All attributes that can be a forward, by module."""
    return {
        name: {k: v for k, v in vars(module).items() if k in ("forward", "_old_forward")}
        for name, module in model.named_modules()
    }


@pytest.fixture
def model():
    """An RMS norm alone, one with accelerate's hook, one that other code replaced, and a linear."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = torch.nn.ModuleDict(
        {name: norm_of(128, device="cpu") for name in ("plain", "hooked", "replaced")}
    )
    model["linear"] = torch.nn.Linear(128, 128)
    add_hook_to_module(model["hooked"], AlignDevicesHook(execution_device="cpu"))
    model["replaced"].forward = lambda x: x + 1
    return model


def test_forwards_are_replaced_in_the_context_only(model):
    before = forwards(model)
    with norms_in_one_kernel(model.values()):
        changed = {name for name, own in forwards(model).items() if own != before[name]}
    assert changed == {"plain", "hooked"}
    assert forwards(model) == before
    with pytest.raises(TypeError), norms_in_one_kernel(model.values()):
        model["plain"]()
    assert forwards(model) == before


def test_forwards_that_other_code_replaces_in_the_context(model):
    def own(x):
        return x

    with norms_in_one_kernel(model.values()):
        model["plain"].forward = own
    assert model["plain"].forward is own


def test_output_without_a_gpu(model):
    inputs = torch.randn(2, 128)
    with torch.no_grad():
        expected = {name: module(inputs) for name, module in model.items()}
        with norms_in_one_kernel(model.values()):
            for name, module in model.items():
                assert torch.equal(module(inputs), expected[name])
                with pytest.raises(TypeError):
                    module(inputs, inputs)


def test_other_threads_run_the_norms_as_usual(model, monkeypatch):
    calls = []
    monkeypatch.setattr(rms_norm, "_norm", lambda *_: calls.append(threading.get_ident()))
    inputs, found = torch.randn(2, 128), []
    expected = model["plain"](inputs)
    with norms_in_one_kernel(model.values()):
        model["plain"](inputs)
        thread = threading.Thread(target=lambda: found.append(model["plain"](inputs)))
        thread.start()
        thread.join()
    assert calls == [threading.get_ident()]
    assert torch.equal(found[0], expected)
