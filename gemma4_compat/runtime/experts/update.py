"""What a LoRA layer adds to experts in 4 bits.

PEFT adds ``scaling * left @ right`` of all experts to the weight, and autograd keeps the sum for
the backward: 1.4 GiB for a layer of 26B-A4B.  Here autograd keeps the factors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

#: ``.of``: the updates of the modules whose forward LoRA layers run in a thread:
#: (id of the module, name of the parameter) -> Update
updates = threading.local()


class Update(NamedTuple):
    """An update of a weight [experts, out, in].

    ``add`` adds it, as PEFT does.  ``factors`` returns left [experts, out, rank], right [experts,
    rank, in], both in the weight's dtype, and the scaling; ``None`` if PEFT has no factors.
    """

    add: Callable[[Any], Any]
    factors: Callable[[], tuple[Any, Any, float]] | None

    def trains(self) -> bool:
        """Whether autograd needs its gradient."""
        import torch

        if not torch.is_grad_enabled():
            return False
        return self.factors is None or any(each.requires_grad for each in self.factors()[:2])

    def added_to(self, weight: Any, experts: Any) -> Any:
        """The weights of some experts, to which the update is added in place."""
        assert self.factors is not None
        left, right, scaling = self.factors()
        return added(weight, left[experts], right[experts], scaling)


def added(weight: Any, left: Any, right: Any, scaling: float) -> Any:
    """A weight to which an update is added in place, without a gradient."""
    import torch

    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        return weight.baddbmm_(left, right, alpha=scaling)


@cache
def with_gradients() -> Callable[..., Any]:
    """A function of left, right, scaling and what makes the sum.  It returns the sum."""
    import torch

    class Sum(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, left: Any, right: Any, scaling: float, make: Any) -> Any:
            ctx.save_for_backward(left, right)
            ctx.scaling = scaling
            return make(left, right)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            left, right = ctx.saved_tensors
            first = grad.bmm(right.transpose(1, 2)) if ctx.needs_input_grad[0] else None
            second = left.transpose(1, 2).bmm(grad) if ctx.needs_input_grad[1] else None
            scaled = (None if each is None else each * ctx.scaling for each in (first, second))
            return *scaled, None, None

    apply: Callable[..., Any] = Sum.apply
    return apply
