"""The rotary embedding in one kernel equals that of transformers bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gemma4_compat.runtime.kernels import launch, rotary
from gemma4_compat.runtime.kernels.rotary import in_one_kernel

modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
#: Not in an attribute of this module, which ``install`` would bind to the replacement.
held = SimpleNamespace(original=modeling.apply_rotary_pos_emb)
held.original = getattr(held.original, "__wrapped__", held.original)
turned = in_one_kernel(held.original)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Rows, tokens, heads, size of a head.
SHAPES = [
    (1, 1, 8, 256), (1, 1, 1, 512), (1, 7, 8, 256), (3, 1, 2, 128), (2, 33, 16, 512),
    (1, 600, 4, 8), (3, 50, 1, 64), (1, 8192, 8, 256), (2, 5, 3, 40),
]  # fmt: skip


@pytest.fixture
def used(monkeypatch):
    """An entry for each launch, except in comparisons."""
    seen, make = [], rotary._equal_launch

    def making(*args):
        function = make(*args)

        def launching(*arguments):
            seen.append(arguments)
            return function(*arguments)

        return None if function is None else launching

    launch.reset(compiled=False)
    monkeypatch.setattr(rotary, "_equal_launch", making)
    yield seen
    launch.reset(compiled=False)


def inputs_of(shape, dtype, device="cuda", angles=None):
    batch, length, _, size = shape
    angles = angles or (batch, length, size)
    return [torch.randn(each, device=device).to(dtype) for each in (shape, angles, angles)]


def check(*inputs, unsqueeze_dim=2):
    with torch.no_grad():
        expected = held.original(*inputs, unsqueeze_dim=unsqueeze_dim)
        output = turned(*inputs, unsqueeze_dim=unsqueeze_dim)
    assert output.dtype == expected.dtype
    assert output.stride() == expected.stride()
    bits = {4: torch.int32, 2: torch.int16, 8: torch.int64}[output.itemsize]
    assert torch.equal(output.view(bits), expected.view(bits))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_equals_that_of_transformers(shape, dtype, used):
    check(*inputs_of(shape, dtype))
    check(*inputs_of(shape, dtype, angles=(1, shape[1], shape[3])))
    assert len(used) == 2


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values(dtype, used):
    values = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-7, -1e-7, 6e4]
    values += [1e-40, -1e-40, 3e38]
    count = len(values)
    grid = torch.cartesian_prod(*[torch.tensor(values)] * 2).cuda()
    x = grid[:, :1].expand(-1, 8 * count).reshape(1, 1, count * count, 8 * count).to(dtype)
    x = torch.cat([x, grid[:, 1:].expand(-1, 8 * count)[None, None].to(dtype)], dim=-1).contiguous()
    angle = torch.tensor(values).repeat_interleave(16)[None, None].to("cuda", dtype)
    for shift in range(count):
        check(x, angle.contiguous(), angle.roll(8 * shift, -1).contiguous())
    assert len(used) == count


@pytest.mark.cuda
def test_what_the_kernel_cannot_compute(used):
    x, cos, sin = inputs_of((2, 5, 4, 64), torch.bfloat16)
    check(x.transpose(1, 2), cos, sin, unsqueeze_dim=1)
    check(x.transpose(0, 1), *inputs_of((5, 2, 4, 64), torch.bfloat16)[1:])
    check(x, cos.float(), sin.float())
    check(x.float(), cos, sin)
    check(x[..., :12], cos[..., :12], sin[..., :12])
    check(x[..., :12].contiguous(), cos[..., :12].contiguous(), sin[..., :12].contiguous())
    check(x, cos[:1], sin)
    check(x[:, :1].contiguous(), cos[:1], sin[:1])  # broadcast over tokens
    check(x.double(), cos.double(), sin.double())
    check(x[:0], cos[:0], sin[:0])
    with torch.no_grad():
        assert torch.equal(turned(x, torch._neg_view(cos), sin, 2), held.original(x, -cos, sin, 2))
        with torch.autocast("cuda"):
            turned(x, cos, sin, 2)
        output = torch.vmap(lambda each: turned(each, cos, sin, 2))(x[None])
        assert torch.equal(output[0], held.original(x, cos, sin, 2))
        with pytest.raises(RuntimeError):
            turned(x, cos[..., :8], sin[..., :8], unsqueeze_dim=2)
    turned(x, cos, sin, unsqueeze_dim=2)
    x.requires_grad_()
    assert turned(x, cos, sin, unsqueeze_dim=2).requires_grad
    assert not used


@pytest.mark.cuda
def test_functions_of_users(used, monkeypatch):
    inputs = inputs_of((1, 5, 4, 64), torch.bfloat16)
    check(*inputs)
    monkeypatch.setattr(modeling, "rotate_half", lambda x: x)
    check(*inputs)
    monkeypatch.undo()
    assert len(used) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_torch_compile(device):
    inputs = inputs_of((1, 5, 4, 64), torch.float32, device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *each: turned(*each, unsqueeze_dim=2), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), held.original(*inputs, unsqueeze_dim=2))


@pytest.mark.cuda
def test_a_capture():
    """It compares nothing: before the first comparison the original is captured."""
    launch.reset()
    own, inputs = in_one_kernel(held.original), inputs_of((1, 1, 8, 256), torch.bfloat16)
    expected = held.original(*inputs, unsqueeze_dim=2)
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            output = own(*inputs, unsqueeze_dim=2)
        graph.replay()
        assert torch.equal(output, expected)
        with torch.no_grad():
            assert torch.equal(own(*inputs, unsqueeze_dim=2), expected)


def test_output_without_a_gpu():
    inputs = inputs_of((1, 5, 4, 64), torch.float32, "cpu")
    check(*inputs)
    assert torch.equal(turned(*inputs, 2), held.original(*inputs, 2))
    heads_first = inputs[0].transpose(1, 2)
    assert torch.equal(turned(heads_first, *inputs[1:]), held.original(heads_first, *inputs[1:]))
