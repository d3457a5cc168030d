"""Logits of a training step that are computed only where they are read.

The logits of Gemma 4 have 262,144 entries for each token.  ``LazyLogits`` stands for them between
the head and the loss.  It holds the hidden states, and notes what the forward does to the logits.
``cross_entropy`` then computes head, logits and loss for some tokens at a time, and at once the
gradients of the hidden states, so that at most ``BYTES`` of memory are in use.

If the head is trained, backward computes its gradient for some entries of the vocabulary at a time,
each as one product of all tokens, so it is rounded as often as that of all logits.  This computes
the logits once more.  The output then has a copy of the weight for those who read its logits after
the step of the optimizer.

The logits of a head with LoRA stay whole: PEFT adds two products that are rounded apart, and one
product for both would be another arithmetic.

The forward returns a ``LazyOutput``: its field ``logits`` is computed when it is first read, by the
operations of the model on all tokens, so it has the same bits.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

from ..errors import ModelError
from ..objects import View
from .kernels import token_loss

logger = logging.getLogger(__name__)

#: of memory for a piece of the logits, its copies and its gradients
BYTES = 256 * 1024**2
#: entries of the vocabulary that are summed at once; a CPU converts them first
_SUMMED = 8192
_CHANGED = (
    "the weight of the head was changed after the forward, so its logits cannot be computed now: "
    "read outputs.logits, and call backward, before the change, or set "
    "GEMMA4_COMPAT_LOSS_MEMORY=0"
)
_WATCHED = (
    "outputs.logits has a hook or retain_grad(), but the loss was computed without these logits, "
    "so they would not see its gradient; set GEMMA4_COMPAT_LOSS_MEMORY=0"
)
#: modules of the modes that change no values of the head: ``torch.device``, and that of ``plan``
_MODES = ("torch.utils._device", "gemma4_compat.model.peak")
#: the errors of an operation that lazy logits do not know
_OURS = (AttributeError, RuntimeError, TypeError, ModelError)
#: of this thread: .in_ddp: whether DDP looks at an output; .stays_lazy: see ``staying_lazy``
_now = threading.local()


# -- the logits ------------------------------------------------------------------------------------


class LazyLogits:
    """Stands for logits [..., vocabulary]; computes them for an operation that it does not know.

    Args:
        hidden: the hidden states [..., size].
        head: makes logits of hidden states.
        steps: what was done to the logits since, elementwise: functions and their arguments.
        late: the weight of a trained head, for a read after it has changed.
    """

    def __init__(
        self, hidden: Any, head: _Head, steps: tuple[tuple[Callable[..., Any], Any], ...] = (),
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
        rows = self.view(-1, self.head.entries).split(_rows_of(self.head.entries, self.hidden))
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
        from torch.autograd.graph import saved_tensors_hooks

        head, cap = self.head, None if self.head.trained is not None else _cap_of(self.steps)
        if hidden.device != head.device or target.dtype != torch.int64:
            cap = None
        if cap is None or not token_loss.can_compute(head.device, head.dtype, head.entries):
            cap, rows = None, _rows_of(head.entries, hidden)
        else:
            rows = max(1, BYTES // (head.entries * head.dtype.itemsize))
        losses, gradients = [], []
        # A checkpoint around the forward must not see the tensors of a piece.
        with head.modes(), saved_tensors_hooks(_same, _same):
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
        from torch.autograd.graph import saved_tensors_hooks

        inputs = hidden.detach().to(weight.dtype)
        of_hidden = torch.zeros_like(hidden, dtype=sums.dtype)
        of_weight = torch.empty_like(weight, dtype=self.head.trained.dtype)
        size, first = _rows_of(len(hidden), weight), 0
        with self.head.modes(), saved_tensors_hooks(_same, _same):
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
            ctx.kept = lazy.head.kept() or _Kept(lazy.head)
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


def _rows_of(entries: int, like: Any) -> int:
    """The number of rows in a piece of PyTorch's loss.

    An entry of the logits needs two tensors of the head's dtype, a float32 copy, its logarithm and
    two gradients of that.
    """
    return max(1, BYTES // (entries * (2 * int(like.element_size()) + 16)))


class _Head:
    """``lm_head`` with the weight and the modes of PyTorch that it has now."""

    def __init__(self, module: Any) -> None:
        import torch

        #: the parameter if it is trained
        self.trained: Any = module.weight if module.weight.requires_grad else None
        # Code that replaces the data of the parameter, or unfreezes it, leaves this tensor alone.
        weight = module.weight.detach()
        self._address = weight.data_ptr()
        self.entries, self.device = int(module.out_features), weight.device
        self._module, self._weight, self._version = module, weight, weight._version
        #: whether the weight is no longer that of the forward
        self._has_changed, self._sums = False, _sums_of(weight)
        #: returns what the graph of the loss keeps; ``None`` if there is none
        self.kept: Callable[[], Any] = lambda: None
        # On meta, ``plan`` counts what a step needs; PyTorch has no autocast there.
        kind = "cpu" if weight.is_meta else self.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._autocast = (kind, dtype, enabled)
        #: the dtype of the logits
        self.dtype = dtype if enabled and weight.dtype != torch.float64 else weight.dtype

    @property
    def weight(self) -> Any:
        """The weight in the dtype of the logits."""
        kept = self.kept()
        return self._weight.to(self.dtype) if kept is None else kept.weight

    def compare(self) -> None:
        """Notice a change through ``.data``, which leaves the version of the weight as it is."""
        if not self._sums.is_meta:
            self._has_changed = not self._sums.equal(_sums_of(self._weight))

    def copy(self) -> Any:
        """The weight of a trained head, for reads after the step of the optimizer."""
        if self.trained is None:
            return None
        return self.weight.clone() if self.weight is self._weight else self.weight

    def __call__(self, hidden: Any, late: Any = None, trained: Any = None) -> Any:
        """Logits, of the ``late`` weight if the own one has changed.

        ``trained`` is a view of the trained weight for which a gradient is wanted.
        """
        import torch

        is_trained = self.trained is not None
        has_changed = self._has_changed or self._weight._version != self._version
        if has_changed or (is_trained and self.trained.data_ptr() != self._address):
            if late is None:
                raise ModelError(_CHANGED)
            weight = late
        elif is_trained and torch.is_grad_enabled():
            weight = self.trained if trained is None else trained
        else:
            weight = self.weight
        if hasattr(self._module, "_hf_hook"):  # which may move the hidden states
            return self._module(hidden)
        return type(self._module).forward(View(self._module, weight=weight), hidden)

    @contextmanager
    def modes(self) -> Iterator[None]:
        import torch

        kind, dtype, enabled = self._autocast
        autocast = torch.autocast(kind, dtype, enabled=enabled)
        with torch.inference_mode(False), torch.enable_grad(), autocast:
            yield


class _Kept:
    """What the graph of the loss keeps until PyTorch frees it."""

    def __init__(self, head: _Head) -> None:
        #: the weight as autocast would convert it for each piece, and the logits that were read
        self.weight, self.read = head.weight, list[Any]()
        head.kept = weakref.ref(self)

    def check_watchers(self) -> None:
        if any(each._backward_hooks or each.retains_grad for each in self.read):
            raise ModelError(_WATCHED)


def _sums_of(weight: Any) -> Any:
    """The bits of sums for some entries of the vocabulary at a time: of columns, and of places.

    The second changes if entries change places.
    """
    import torch

    exact = torch.promote_types(weight.dtype, torch.float32)
    sums = []
    for part in weight.split(_SUMMED):
        rows = part.sum(1, dtype=exact)
        places = torch.arange(len(rows), dtype=exact, device=rows.device)
        sums += [part.sum(0, dtype=exact), (rows * places).sum(0, keepdim=True)]
    return torch.cat(sums).view(torch.uint8)


# -- the output ------------------------------------------------------------------------------------


class LazyOutput:
    """A base of a ``ModelOutput`` whose field ``logits`` is computed when it is first read."""

    #: the fields that accelerate's hooks leave where they are
    _kept: Any = ()

    def __post_init__(self) -> None:
        with staying_lazy():
            super().__post_init__()  # type: ignore[misc]

    @property
    def logits(self) -> Any:
        value = vars(self).get("logits")
        if isinstance(value, LazyLogits) and not getattr(_now, "stays_lazy", False):
            value = self.logits = value.read()
        return value

    @logits.setter
    def logits(self, value: Any) -> None:
        vars(self)["logits"] = value

    @logits.deleter
    def logits(self) -> None:
        del vars(self)["logits"]

    def __getitem__(self: Any, key: Any) -> Any:
        names = list(self.keys())
        if isinstance(key, slice):
            return tuple(getattr(self, name) for name in names[key])
        if not isinstance(key, str):
            return getattr(self, names[key])
        key = self._name_of(key)
        if key not in names:
            raise KeyError(key)
        return getattr(self, key)

    def get(self: Any, key: Any, default: Any = None) -> Any:
        return self[key] if self._name_of(key) in self.keys() else default

    def _name_of(self: Any, key: Any) -> Any:
        """The name of a field; transformers 5.24 has renamed some, and knows the old names."""
        renamed = getattr(self, "_replace_old_cache_name", None)
        return key if renamed is None else renamed(key)

    def items(self: Any) -> Any:
        return {name: getattr(self, name) for name in self.keys()}.items()

    def values(self: Any) -> Any:
        if getattr(_now, "in_ddp", False):
            return [vars(self)[name] for name in self.keys()]
        return dict(self.items()).values()

    def __reduce__(self: Any) -> Any:
        """Copies and pickles are upstream's outputs."""
        base = type(self).__mro__[2]
        return base, tuple(getattr(self, each.name) for each in fields(self))

    def mapped(self: Any, function: Callable[[Any], Any], kept: Any = ()) -> Any:
        """The output with other values; the logits stay lazy."""
        values = {each.name: vars(self).get(each.name) for each in fields(self)}
        output = type(self)(**{n: v if n in kept else function(v) for n, v in values.items()})
        output._kept = self._kept
        return output

    def to(self: Any, device: Any, **kwargs: Any) -> Any:
        """accelerate's hooks call it to send an output to the device of the input."""
        from accelerate.utils import send_to_device

        return self.mapped(partial(send_to_device, device=device, **kwargs), self._kept)


@lru_cache
def _lazy(kind: Any) -> Any:
    return type(kind.__name__, (LazyOutput, kind), {"__module__": kind.__module__})


def in_float32(convert: Callable[[Any], Any], value: Any) -> Any:
    """The value of accelerate's ``convert_to_fp32``, which is ``convert``."""
    if not isinstance(value, LazyOutput):
        return convert(value)
    return value.mapped(lambda each: each.float() if type(each) is LazyLogits else convert(each))


def in_ddp(original: Callable[[Any], Any], value: Any) -> Any:
    """What DDP's functions return for the output of a forward; they need no logits."""
    if not isinstance(value, LazyOutput):
        return original(value)
    _now.in_ddp = True
    try:
        return original(value)
    finally:
        _now.in_ddp = False


@contextmanager
def staying_lazy(is_lazy: bool = True) -> Iterator[None]:
    """A block in which this thread reads ``outputs.logits`` without computing them."""
    outer, _now.stays_lazy = getattr(_now, "stays_lazy", False), is_lazy
    try:
        yield
    finally:
        _now.stays_lazy = outer


# -- the forward -----------------------------------------------------------------------------------


class _Recorded(View):
    """A module that keeps its last output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._module(*args, **kwargs)
        vars(self)["output"] = output
        return output


def lazily(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a model with labels; its logits are lazy if that changes nothing else."""
    labels = kwargs.get("labels")
    if not hasattr(labels, "numel") or not _can_be_lazy(model, labels, kwargs):
        return original(model, *args, **kwargs)
    head = _Head(_plain(model.lm_head))
    kept = _Kept(head)  # noqa: F841  (until the loss has it)
    backbone = _Recorded(model.model)

    def lazy_head(hidden: Any) -> LazyLogits:
        # A copy, as the hidden states are also in the output.
        return LazyLogits(hidden.clone(), head, late=head.copy())

    try:
        lazy = View(model, model=backbone, lm_head=lazy_head)
        output = original(lazy, *args, **kwargs)
        values = {each.name: getattr(output, each.name) for each in fields(output)}
        kind: Any = type(output)
        lazy_output = _lazy(kind)(**values)
        lazy_output._kept = model._skip_keys_device_placement or ()
        return lazy_output
    except _OURS as error:
        # Not a subclass: these are for the callers, as those of a checkpoint around this forward.
        if "output" not in vars(backbone) or type(error) not in _OURS:
            raise
        logger.info("all logits of this step are computed: %s: %s", type(error).__name__, error)
        whole = View(model, model=lambda *args, **kwargs: backbone.output)
        return original(whole, *args, **kwargs)


def _plain(head: Any) -> Any:
    """The copy of the head that PEFT's ``modules_to_save`` runs; another head itself."""
    from torch import nn

    kind = type(head)
    if (kind.__module__, kind.__name__) != ("peft.utils.other", "ModulesToSaveWrapper"):
        return head
    if "forward" in vars(head):
        return head
    name, *others = head.active_adapters or [None]
    if head.disable_adapters or others or name not in head.modules_to_save:
        return head
    own = head.modules_to_save[name]
    return own if type(own) is nn.Linear else head


def _hooks(module: Any) -> bool:
    hooks = (
        module._forward_hooks, module._forward_pre_hooks,
        module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks)


def _can_be_lazy(model: Any, labels: Any, kwargs: dict[str, Any]) -> bool:
    import torch
    from torch.nn.modules import module as modules
    from torch.overrides import _get_current_function_mode_stack
    from transformers.loss import loss_utils

    losses = loss_utils.__name__
    head = _plain(model.lm_head)
    if type(head) is not torch.nn.Linear or type(head.weight) is not torch.nn.Parameter:
        return False
    forward = vars(head).get("_old_forward" if hasattr(head, "_hf_hook") else "forward")
    is_trained = any(each.requires_grad for each in head.parameters())
    special = (
        head.bias is not None,
        is_trained and hasattr(head, "_hf_hook"),
        head.weight.is_meta and hasattr(head, "_hf_hook"),  # offloaded
        forward is not None and getattr(forward, "__func__", None) is not type(head).forward,
        getattr(head, "_is_fsdp_managed_module", False),
        hasattr(head.weight, "ds_id"),  # DeepSpeed may take the weight away
        getattr(model, "_is_replica", False),  # DataParallel gathers the logits
        _hooks(head) or _hooks(model.lm_head),
        modules._global_forward_hooks or modules._global_forward_pre_hooks,
        modules._global_backward_hooks or modules._global_backward_pre_hooks,
    )
    return (
        torch.is_grad_enabled()
        and not any(special)
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and not torch._C._are_functorch_transforms_active()
        and kwargs.get("return_dict", model.config.return_dict) is not False
        and labels.numel() > 2 * _rows_of(head.out_features, head.weight)
        and _is_known(model.loss_function, losses)
        and _is_known(loss_utils.fixed_cross_entropy, losses)
        and _is_known(torch.nn.functional.cross_entropy, "torch.nn.functional")
        and _is_known(torch.nn.Linear.forward, "torch.nn.modules.linear")
        and _is_known(torch.nn.Module.__call__, "torch.nn.modules.module")
        and torch.nn.functional.linear is torch._C._nn.linear
        and all(type(each).__module__ in _MODES for each in _get_current_function_mode_stack())
    )


def _is_known(function: Any, module: str) -> bool:
    """Whether a function is the library's own, and was neither replaced nor decorated."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == sys.modules[module].__file__
