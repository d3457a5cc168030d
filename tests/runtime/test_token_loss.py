"""The kernel for the loss of each row equals PyTorch's operations, and so does its gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from gemma4_compat.runtime.kernels import compiler, launch, token_loss
from tests import support

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GPU = torch.device("cuda", 0)
IGNORED = -100


def whole(logits, target, cap):
    """What the model and the loss compute, with the gradient of the sum."""
    logits = logits.clone().requires_grad_()
    capped = torch.tanh(logits / cap) * cap if cap else logits
    losses = functional.cross_entropy(
        capped.float() if logits.dtype != torch.float64 else capped, target,
        ignore_index=IGNORED, reduction="none",
    )  # fmt: skip
    [gradient] = torch.autograd.grad(losses.sum(), logits)
    return losses.detach(), gradient


def fused(logits, target, cap):
    assert token_loss.can_compute(logits.device, logits.dtype, logits.shape[-1])
    gradient = logits.clone()
    return token_loss.losses_(gradient, target, cap, IGNORED), gradient


def example(dtype, size=4096, rows=7, scale=10.0):
    torch.manual_seed(0)
    logits = (scale * torch.randn(rows, size)).to(GPU, dtype)
    target = torch.randint(0, size, (rows,), device=GPU)
    target[2] = IGNORED
    return logits, target


def off(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize(("size", "scale"), [(4096, 10.0), (1003, 1.0), (262144, 3.0), (7, 200.0)])
def test_losses_and_gradients(dtype, cap, size, scale):
    """At most the error of PyTorch's operations, and the same forward."""
    logits, target = example(dtype, size, scale=scale)
    expected, expected_gradient = whole(logits, target, cap)
    exact, exact_gradient = whole(logits.double(), target, cap)
    losses, gradient = fused(logits, target, cap)
    # The soft cap is rounded in the same way; the sums have another order.
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    epsilon = torch.finfo(torch.float32).eps
    assert off(losses, exact) <= 1.1 * off(expected, exact) + 4 * epsilon
    assert off(gradient, exact_gradient) <= 1.1 * off(expected_gradient, exact_gradient) + epsilon
    assert losses[2] == 0
    assert not gradient[2].any()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(dtype):
    """One dominant logit, equal logits, and logits of -inf, inf and nan."""
    logits = torch.zeros(6, 512, device=GPU, dtype=dtype)
    logits[0, 3] = 1000
    logits[2, 5:] = -torch.inf
    logits[3, 9] = torch.inf
    logits[4, 100] = torch.nan
    logits[5] = torch.finfo(dtype).tiny / 8  # subnormal
    target = torch.full((6,), 3, device=GPU)
    for cap in (0.0, 30.0):
        for found, expected in zip(
            fused(logits, target, cap), whole(logits, target, cap), strict=True
        ):
            torch.testing.assert_close(
                found.float(), expected.float(), rtol=0.01, atol=1e-6, equal_nan=True
            )


@pytest.mark.cuda
def test_a_strided_target_and_no_rows():
    logits, target = example(torch.bfloat16)
    spread = torch.stack((target, torch.zeros_like(target)), 1)[:, 0]
    assert torch.equal(fused(logits, spread, 30.0)[0], fused(logits, target, 30.0)[0])
    assert fused(logits[:0], target[:0], 30.0)[0].shape == (0,)


def test_where_pytorch_computes_the_loss(monkeypatch):
    assert not token_loss.can_compute(torch.device("cpu"), torch.float32, 512)
    assert not token_loss.can_compute(torch.device("meta"), torch.float64, 512)
    assert token_loss.can_compute(torch.device("meta"), torch.bfloat16, 512)

    launch.reset()
    monkeypatch.setattr(compiler, "compiled", support.fails(compiler.KernelError("out of memory")))
    assert not token_loss.can_compute(GPU, torch.float32, 512)
    monkeypatch.undo()
    launch.reset()


@pytest.mark.cuda
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_a_launch_that_the_driver_refuses(monkeypatch, cap):
    """PyTorch computes losses and gradients, this time and from then on."""
    logits, target = example(torch.bfloat16)
    expected = whole(logits, target, cap)
    assert token_loss.can_compute(GPU, logits.dtype, logits.shape[-1])
    refused = support.fails(compiler.KernelError("too many resources"))
    monkeypatch.setattr(compiler, "launcher", lambda *args: refused)
    losses = token_loss.losses_(logits, target, cap, IGNORED)
    assert torch.equal(losses, expected[0])
    assert torch.equal(logits, expected[1])
    assert not token_loss.can_compute(GPU, logits.dtype, logits.shape[-1])
    monkeypatch.undo()
    launch.reset()
