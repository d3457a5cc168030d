"""Compares the merged model's logits with those of the model with the adapter loaded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .result import Parity


@contextlib.contextmanager
def rounded_once_more(model: Any) -> Iterator[None]:
    """Change the outputs of all layers with an adapter at random, as one more rounding would.

    Merging rounds each merged weight once more, and does not round the adapter's outputs.  How far
    that changes the logits depends on the model, so it is measured, with relative changes of up to
    half the epsilon of bfloat16.
    """
    size = torch.finfo(torch.bfloat16).eps
    generator = torch.Generator(model.device).manual_seed(0)

    def change(module: Any, args: Any, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator, device=output.device) - 0.5
        return (output.float() * (1 + size * noise)).to(output.dtype)

    layers = [m for m in model.modules() if hasattr(m, "get_base_layer")]
    hooks = [layer.register_forward_hook(change) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compare(name: str, actual: Tensor, expected: Tensor, effect: float, tolerance: float) -> Parity:
    """Compare logits, float32 [positions, vocabulary] on the CPU."""
    other = actual.argmax(-1) != expected.argmax(-1)
    first, second = expected.topk(2).values.T
    # Either of the two may be off by the tolerance times the usual size of a logit.
    undecided = first - second <= 2 * tolerance * expected.square().mean(-1).sqrt()
    counts = int(other.sum()), int((other & undecided).sum())
    return Parity(name, len(expected), effect, worst(actual, expected), tolerance, *counts)


def worst(actual: Tensor, expected: Tensor) -> float:
    """The relative difference at the worst position; infinite if a value is not finite."""
    if not actual.isfinite().all():
        return math.inf
    relative: Tensor = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(relative.max())


def logits(model: Any, prompt: dict[str, Tensor]) -> Tensor:
    """The logits of a prompt: float32 [positions, vocabulary], on the CPU."""
    with torch.inference_mode():
        output: Tensor = model(**prompt).logits[0]
    return output.float().cpu()


def continued(model: Any, prompt: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prompt followed by the model's greedy answer, to compare the answer's logits, too."""
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    new = tokens[:, prompt["input_ids"].shape[1] :]
    added = {"input_ids": new, "attention_mask": torch.ones_like(new)}
    added["mm_token_type_ids"] = torch.zeros_like(new)
    return {k: torch.cat([v, added[k]], dim=1) if k in added else v for k, v in prompt.items()}
