"""Logits that are computed where they are read, and their loss."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..kernels import token_loss
from .head import Head, Kept, rows_of


class LazyLogits:
    """Stands for logits [..., vocabulary]; computes them for an operation that it does not know.

    Args:
        hidden: the hidden states [..., size].
        head: makes logits of hidden states.
        steps: what was done to the logits since, elementwise: functions and their arguments.
        late: the weight of a trained head, for a read after it has changed.
    """

    def __init__(
        self, hidden: Any, head: Head, steps: tuple[tuple[Callable[..., Any], Any], ...] = (),
        late: Any = None,
    ) -> None:  # fmt: skip
        self.hidden, self.head, self.steps, self.late = hidden, head, steps, late

    def read(self) -> Any:
        """All logits, as the forward has them; their backward computes them once more."""
        import torch
        from torch.utils.checkpoint import checkpoint

        lazy = self._with(self.hidden)
        with self.head.modes():
            self.head.compare()
            if torch._C._are_functorch_transforms_active():  # no checkpoint is possible there
                return lazy._of(self.hidden)
            found = checkpoint(lazy._of, self.hidden, use_reentrant=False, preserve_rng_state=False)
        lazy.late = None
        if (kept := self.head.kept()) is not None:
            kept.read.append(found)
        return found

    def _of(self, hidden: Any, trained: Any = None) -> Any:
        return self._after(self.head(hidden, self.late, trained))

    def _after(self, logits: Any) -> Any:
        for function, arguments in self.steps:
            logits = function(logits, *arguments)
        return logits

    def _then(self, function: Callable[..., Any], *arguments: Any) -> LazyLogits:
        return LazyLogits(self.hidden, self.head, (*self.steps, (function, arguments)), self.late)

    def _with(self, hidden: Any) -> LazyLogits:
        return LazyLogits(hidden, self.head, self.steps, self.late)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._of(self.hidden), name)

    @property
    def shape(self) -> Any:
        return type(self.hidden.shape)((*self.hidden.shape[:-1], self.head.entries))

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def device(self) -> Any:
        return self.head.device

    def __truediv__(self, other: Any) -> Any:
        return self._then(operator.truediv, other)

    def __mul__(self, other: Any) -> Any:
        return self._then(operator.mul, other)

    def float(self) -> Any:
        import torch

        return self._then(torch.Tensor.float)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self._then(lambda logits: logits.to(*args, **kwargs))

    def contiguous(self) -> Any:
        return self

    def view(self, *shape: int) -> Any:
        if shape[-1] != self.head.entries:
            return self._of(self.hidden).view(*shape)
        return self._with(self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    reshape = view

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            is_whole = isinstance(key[-1], slice) and key[-1] == slice(None)
            keeps_rows = is_whole and (key[0] is ... or len(key) == len(self.shape))
        else:
            keeps_rows = hasattr(key, "ndim") and key.ndim < len(self.shape)
        return self._with(self.hidden[key]) if keeps_rows else self._of(self.hidden)[key]

    def split(self, size: int, dim: int = 0) -> Any:
        if dim != 0:
            return self._of(self.hidden).split(size, dim)
        return [self._with(hidden) for hidden in self.hidden.split(size)]

    def argmax(self, dim: int) -> Any:
        import torch

        if dim != -1:
            return self._of(self.hidden).argmax(dim)
        rows = self.view(-1, self.head.entries).split(rows_of(self.head.entries, self.hidden))
        return torch.cat([each._of(each.hidden).argmax(-1) for each in rows]).view(self.shape[:-1])

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        import torch

        kwargs = kwargs or {}
        if function is torch.tanh:
            return args[0]._then(torch.tanh)
        if function is torch.nn.functional.cross_entropy:
            loss = args[0]._cross_entropy(*args[1:], **kwargs)
            if loss is not None:
                return loss
        return function(*_computed(args), **_computed(kwargs))

    # -- the loss

    def _cross_entropy(
        self, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
        reduce: Any = None, reduction: str = "mean", label_smoothing: Any = 0.0,
    ) -> Any:  # fmt: skip
        """The loss of rows [N, vocabulary]; ``None`` if these arguments need all logits."""
        import torch

        others = (weight, size_average, reduce)
        if len(self.shape) != 2 or label_smoothing or any(each is not None for each in others):
            return None
        lazy = LazyLogits(None, self.head, self.steps)  # backward needs no copy of the weight
        losses = _losses().apply(self.hidden, self.head.trained, target, lazy, ignore_index)
        # As rows of one class, PyTorch reduces them as cross_entropy does.
        ignored = torch.where(target == ignore_index, -100, 0)
        return torch.nn.functional.nll_loss(-losses[:, None], ignored, reduction=reduction)

    def _in_pieces(self, hidden: Any, target: Any, ignore_index: int, wanted: bool) -> Any:
        """The loss of each row of hidden states, and its gradient if it is wanted, else ``None``.

        If the head is trained, the logarithm of the sum of all exponentials in place of a gradient.
        """
        import torch

        head, cap = self.head, None if self.head.trained is not None else _cap_of(self.steps)
        if hidden.device != head.device or target.dtype != torch.int64:
            cap = None
        if cap is None or not token_loss.can_compute(head.device, head.dtype, head.entries):
            cap, rows = None, rows_of(head.entries, hidden)
        else:
            rows = head.kernel_rows()
        losses, gradients = [], []
        # A checkpoint around the forward must not see the tensors of a piece.
        with head.modes(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            for piece, labels in zip(hidden.split(rows), target.split(rows), strict=True):
                if cap is not None:
                    with torch.no_grad():
                        logits = head(piece)
                        losses.append(token_loss.losses_(logits, labels, cap, ignore_index))
                        if wanted:
                            gradients.append(logits @ head.weight)
                    continue
                with torch.set_grad_enabled(wanted and head.trained is None):
                    inputs = piece.detach().requires_grad_()
                    logits = self._of(inputs)
                    own = _losses_of(logits, labels, ignore_index)
                losses.append(own.detach())
                if own.requires_grad:
                    gradients += torch.autograd.grad(own.sum(), inputs)
                elif wanted:
                    exact = torch.promote_types(logits.dtype, torch.float32)
                    gradients.append(logits.to(exact).logsumexp(-1))
        return torch.cat(losses), torch.cat(gradients) if gradients else None

    def _gradients_of_trained(
        self, weights: Any, hidden: Any, target: Any, sums: Any, weight: Any, wanted: bool
    ) -> tuple[Any, Any]:
        """Those of the hidden states, if they are wanted, and of the weight of a trained head.

        Args:
            weights: of the losses; 0 for tokens without a target.
            sums: for each token the logarithm of the sum of all exponentials.
        """
        import torch

        inputs = hidden.detach().to(weight.dtype)
        of_hidden = torch.zeros_like(hidden, dtype=sums.dtype)
        of_weight = torch.empty_like(weight, dtype=self.head.trained.dtype)
        size, first = rows_of(len(hidden), weight), 0
        with self.head.modes(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            for part, of_part in zip(weight.split(size), of_weight.split(size), strict=True):
                logits = (inputs @ part.T).requires_grad_()
                found = self._after(logits)
                with torch.no_grad():
                    change = found.to(sums.dtype, copy=True).sub_(sums[:, None]).exp_()
                    index = (target - first).clamp(0, len(part) - 1)
                    is_inside = (index == target - first).to(change.dtype)
                    change.scatter_add_(1, index[:, None], -is_inside[:, None])
                    change = change.mul_(weights[:, None]).to(found.dtype)
                    [change] = torch.autograd.grad(found, logits, change)
                    of_part.copy_(change.T @ inputs)
                    if wanted:
                        of_hidden += change @ part
                first += len(part)
        return of_hidden.to(hidden.dtype), of_weight


@lru_cache
def _losses() -> Any:
    import torch

    # An older PyTorch does not tell whether it keeps the graph.
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)

    class Losses(torch.autograd.Function):  # type: ignore[misc]
        """The loss of each row; its backward has nothing left to compute."""

        @staticmethod
        def forward(
            ctx: Any, hidden: Any, trained: Any, target: Any, lazy: Any, ignore_index: int
        ) -> Any:
            wanted = any(ctx.needs_input_grad)
            losses, found = lazy._in_pieces(hidden, target, ignore_index, wanted)
            weight = None if lazy.head.trained is None else lazy.head.weight
            ctx.save_for_backward(hidden, target, found, weight)
            ctx.lazy, ctx.ignore_index = lazy, ignore_index
            ctx.kept = lazy.head.kept() or Kept(lazy.head)
            return losses

        @staticmethod
        def backward(ctx: Any, weights: Any) -> Any:
            hidden, target, found, weight = ctx.saved_tensors
            lazy, needed = ctx.lazy, ctx.needs_input_grad[:2]
            ctx.kept.check_watchers()
            of_weight = None
            if torch.is_grad_enabled():  # for a second derivative
                # Views: hidden states of a tied model depend on the weight as well.
                views = [None if x is None else x.view_as(x) for x in (hidden, lazy.head.trained)]
                inputs = zip(views, needed, strict=True)
                with lazy.head.modes():
                    losses = _losses_of(lazy._of(*views), target, ctx.ignore_index)
                own = iter(
                    torch.autograd.grad(
                        losses,
                        [each for each, is_needed in inputs if is_needed],
                        weights,
                        create_graph=True,
                    )
                )
                of_hidden, of_weight = (next(own) if each else None for each in needed)
            elif lazy.head.trained is None:
                of_hidden = (weights[:, None] * found).to(hidden.dtype)
            else:
                weights = torch.where(target == ctx.ignore_index, 0, weights)
                of_hidden, of_weight = lazy._gradients_of_trained(
                    weights, hidden, target, found, weight, needed[0]
                )
            if not keeps_graph():  # PyTorch frees saved tensors only
                ctx.lazy = ctx.kept = None
            return of_hidden, of_weight, None, None, None

    return Losses


def _losses_of(logits: Any, target: Any, ignore_index: int) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")


def _same(tensor: Any) -> Any:
    return tensor


def _cap_of(steps: Any) -> float | None:
    """The soft cap of logits that become float32 afterwards, 0 for none; ``None``: other steps."""
    import torch

    functions = [function for function, _ in steps]
    if functions == [torch.Tensor.float]:
        return 0.0
    if functions != [operator.truediv, torch.tanh, operator.mul, torch.Tensor.float]:
        return None
    [divisor], _, [factor], _ = (arguments for _, arguments in steps)
    return float(divisor) if isinstance(divisor, (int, float)) and divisor == factor else None


def _computed(value: Any) -> Any:
    """The arguments of a function, with the logits themselves."""
    if isinstance(value, LazyLogits):
        return value._of(value.hidden)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_computed, value))
    if isinstance(value, dict):
        return {name: _computed(each) for name, each in value.items()}
    return value
