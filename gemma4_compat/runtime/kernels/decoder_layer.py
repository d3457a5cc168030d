"""Computes what is between the products of a decoder layer in a few kernels, with the same bits.

After attention and after the MLP, a layer normalizes, adds the residual, and begins its next part
with another norm.  That is one kernel here (``rms_norm.cu``), and so is the activation of a gate,
times other values (``gated.cu``).  Both round as transformers' kernels do, and are compared with
them before their first use.  So is the order in which a layer and an MLP call their modules.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...objects import View
from . import compiler, rms_norm_launch
from .compiler import KernelError
from .launch import Launcher
from .replacing import (
    ALIGNMENT,
    FEW_TOKENS,
    can_read,
    dtypes,
    is_gelu,
    plain,
    raw_stream,
    runs_only,
)
from .rms_norm import weight_of
from .trials import pattern, require_equal
from .watch import wrapped_by

LAUNCHER = Launcher("gated", "transformers computes activations and products in its own kernels")
ORDER = Launcher("decoder_layer", "transformers computes decoder layers or MLPs")
_FILE = Path(__file__).with_name("gated.cu")
_THREADS, _VALUES = 256, 4  # of a block, of a thread
_FOLDER = str(_FILE.parents[2])
#: the modules that a layer calls, besides its attention
_PARTS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "mlp",
    "post_feedforward_layernorm", "per_layer_input_gate", "act_fn", "per_layer_projection",
    "post_per_layer_input_norm",
)  # fmt: skip


def layer_forward(original: Any, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """A decoder layer's forward; with a few tokens and without experts, it uses the kernels."""
    if (
        not plain()(hidden_states)
        or not _may_run(original, hidden_states)
        or getattr(self, "enable_moe_block", False)
    ):
        return original(self, hidden_states, *args, **kwargs)
    code = _code(original)
    names = code.co_varnames[2 : code.co_argcount]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if (
        len(given) < len(args) + len(kwargs)  # transformers raises the error
        or "past_key_values" in given.keys() - set(names)  # has another name now
        or self.layer_scalar is None
    ):
        return original(self, hidden_states, *args, **kwargs)
    kind = _kind(original, self, hidden_states)
    arguments = original, self, hidden_states, names
    if not ORDER.compared(kind, hidden_states.device, _same_layer, *arguments):
        return original(self, hidden_states, *args, **kwargs)
    return _layer(self, hidden_states, **{**dict.fromkeys(names), **given})


def _layer(layer: Any, hidden_states: Any, per_layer_input: Any = None, **given: Any) -> Any:
    outputs, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **given)
    norm, following = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
    residual, outputs = added(norm, outputs, hidden_states, None, following)
    outputs, norm = layer.mlp(outputs), layer.post_feedforward_layernorm
    if getattr(layer, "hidden_size_per_layer_input", None):
        residual, _ = added(norm, outputs, residual)
        outputs = gated(layer.act_fn, layer.per_layer_input_gate(residual), per_layer_input)
        outputs, norm = layer.per_layer_projection(outputs), layer.post_per_layer_input_norm
    return added(norm, outputs, residual, layer.layer_scalar)[0]


def mlp_forward(original: Any, self: Any, x: Any) -> Any:
    """An MLP's forward; with a few tokens, it uses the kernel."""
    # Another activation may be called before up_proj only.
    if not plain()(x) or not _may_run(original, x) or not is_gelu(self.act_fn):
        return original(self, x)
    kind = _kind(original, self, x)
    if not ORDER.compared(kind, x.device, _same_mlp, original, self, x):
        return original(self, x)
    return _mlp(self, x)


def _mlp(mlp: Any, x: Any) -> Any:
    return mlp.down_proj(gated(mlp.act_fn, mlp.gate_proj(x), mlp.up_proj(x)))


def _kind(original: Any, module: Any, x: Any) -> tuple[Any, ...]:
    has_more, code = bool(getattr(module, "hidden_size_per_layer_input", None)), _code(original)
    return code, type(module), has_more, x.get_device(), x.dtype, x.shape


def _same_layer(original: Any, layer: Any, x: Any, names: tuple[str, ...]) -> bool:
    """Whether a layer of this kind computes what ``_layer`` computes, else an error."""
    parts, seen = _stand_ins(x, (*_PARTS, "self_attn")), []
    trial, scalar = (pattern(shape, x.dtype, x.device) for shape in (x.shape, (2,)))

    def self_attn(hidden_states: Any, **given: Any) -> Any:
        seen.append(given)
        return parts["self_attn"](hidden_states), None

    view = View(layer, **{**parts, "self_attn": self_attn, "layer_scalar": scalar[1:]})
    more = {"per_layer_input": trial.flip(-1)} if "per_layer_input" in names else {}
    for given in (more, {name: object() for name in (*names, "another")} | more):
        found = _layer(view, trial.clone(), **{**dict.fromkeys(names), **given})
        require_equal(found, original(view, trial.clone(), **given))
        if seen[-2] != seen[-1]:
            raise KernelError("its attention gets other arguments than the original's")
    return True


def _same_mlp(original: Any, mlp: Any, x: Any) -> bool:
    """Whether an MLP of this kind computes what ``_mlp`` computes, else an error."""
    view = View(mlp, **_stand_ins(x, ("gate_proj", "act_fn", "up_proj", "down_proj")))
    trial = pattern(x.shape, x.dtype, x.device)
    require_equal(_mlp(view, trial), original(view, trial))
    return True


def _stand_ins(x: Any, names: tuple[str, ...]) -> dict[str, Callable[[Any], Any]]:
    """Functions in place of a layer's modules; each has its own factors and terms."""

    def stand_in(seed: int) -> Callable[[Any], Any]:
        factor, term = pattern((2, x.shape[-1]), x.dtype, x.device, seed)
        return lambda x: x * factor + term

    return {name: stand_in(seed) for seed, name in enumerate(names, 1)}


def _may_run(original: Any, x: Any) -> bool:
    """Whether these are a few tokens, and the forward is that of transformers."""
    return x.dim() > 0 and 0 < x.numel() <= FEW_TOKENS * x.shape[-1] and _is_transformers(original)


def _is_transformers(function: Any) -> bool:
    """Whether a function, and each that it wraps, has code of transformers or of this package."""
    import transformers

    codes = (getattr(each, "__code__", None) for each in wrapped_by(function))
    folders = os.path.dirname(transformers.__file__), _FOLDER
    return all(code is not None and code.co_filename.startswith(folders) for code in codes)


def _code(function: Any) -> Any:
    return inspect.unwrap(function).__code__


def added(norm: Any, x: Any, residual: Any, scalar: Any = None, following: Any = None) -> Any:
    """``(residual + norm(x)) * scalar``, and ``following`` of that; both are [..., size]."""
    outputs = _added(norm, x, residual, scalar, following)
    if outputs is None:
        out = residual + norm(x)
        if scalar is not None:
            out *= scalar
        outputs = out, None if following is None else following(out)
    return outputs


def _added(norm: Any, x: Any, residual: Any, scalar: Any, following: Any) -> Any:
    """The same in one kernel, if it can compute it."""
    import torch

    key, launcher = None, rms_norm_launch.LAUNCHER
    given = [each for each in (x, residual, scalar) if each is not None]
    if not can_read(*given) or residual.shape != x.shape:
        return None
    try:
        size, index = x.shape[-1], x.get_device()
        norms = [each for each in (norm, following) if each is not None]
        weights = [weight_of(each, size, index) for each in norms if _is_usual(each)]
        if len(weights) < len(norms) or any(each is None for each in weights):
            return None
        pairs = zip(norms, weights, strict=True)
        kinds = {
            (type(norm).forward, type(norm)._norm, norm.eps, weight.dtype) for norm, weight in pairs
        }
        if (
            len(kinds) > 1
            or any(each.data_ptr() % ALIGNMENT for each in weights)
            or (scalar is not None and scalar.shape != (1,))
        ):
            return None
        rows = x.numel() // size
        key = (
            *("added", *kinds, index, x.dtype, size),
            *(rows.bit_length(), scalar is None, following is None),
        )
        arguments = norm, x, weights, scalar, following
        launch = launcher.compared(key, x.device, _equal_sum, *arguments)
        if launch is None:
            return None
        out, then = torch.empty_like(x), None if following is None else torch.empty_like(x)
        launch(raw_stream()(index), rows, *_pointers(out, x, weights, residual, scalar, then))
        return out, then
    except Exception as error:  # transformers computes it, or raises its own error
        return launcher.failed(key, x.device, error)


def _is_usual(norm: Any) -> bool:
    """Whether a call of a module runs transformers' RMS norm alone."""
    cls, own = type(norm), vars(norm)
    return (
        own.get("with_scale") is True
        and type(own.get("eps")) is float
        and "_norm" not in own
        and runs_only(norm, cls.forward)
        and _is_transformers(cls.forward)
        and _is_transformers(getattr(cls, "_norm", len))
    )


def _pointers(out: Any, x: Any, weights: Any, residual: Any, scalar: Any, then: Any) -> list[int]:
    tensors = out, x, weights[0], residual, scalar, then, weights[-1]
    return [0 if each is None else each.data_ptr() for each in tensors]


def _equal_sum(norm: Any, x: Any, weights: Any, scalar: Any, following: Any) -> Any:
    """The launch whose outputs equal those of transformers bit for bit; ``None`` if it has none."""
    import torch

    stream = raw_stream()(x.get_device())

    def compare(launch: Any, trial: Any, _: int) -> None:
        residual, factor = trial.flip(0) / 2, None if scalar is None else scalar.to(trial.dtype)
        out, then = (torch.full_like(trial, float("nan")) for _ in range(2))
        pointers = out, trial, weights, residual, factor, None if following is None else then
        launch(stream, len(trial), *_pointers(*pointers))
        right = residual + norm(trial)
        require_equal(out, right if factor is None else right.mul_(factor))
        if following is not None:
            require_equal(then, following(right))

    launches = rms_norm_launch.compared(norm, x, weights[0], rms_norm_launch.NORM, compare)
    return None if launches is None else launches[0]


def gated(activation: Any, x: Any, other: Any) -> Any:
    """``activation(x) * other``, of the same shape."""
    out = _gated(activation, x, other)
    return activation(x) * other if out is None else out


def _gated(activation: Any, x: Any, other: Any) -> Any:
    """The same in one kernel, if it can compute it."""
    import torch

    if not (is_gelu(activation) and can_read(x, other)) or x.shape != other.shape:
        return None
    key = x.get_device(), x.dtype
    try:
        if x.numel() % _VALUES:
            return None
        launch = LAUNCHER.compared(key, x.device, _equal_launch, activation, x)
        if launch is None:
            return None
        out = torch.empty_like(x)
        launch(out, x, other)
        return out
    except Exception as error:  # transformers computes it, or raises its own error
        return LAUNCHER.failed(key, x.device, error)


def _equal_launch(activation: Any, x: Any) -> Callable[..., None] | None:
    """What launches the kernel if it equals PyTorch's for each number of a dtype in 16 bits."""
    import torch

    if x.dtype not in dtypes() or x.dtype is torch.float32:
        return None
    kernel = compiler.compiled(_FILE, "gated", x.device, INPUT=dtypes()[x.dtype])
    launch, index = compiler.launcher(kernel, 4, (), (_THREADS, 1), early=True), x.get_device()

    def launched(out: Any, x: Any, other: Any) -> None:
        fours, pointers = out.numel() // _VALUES, (out.data_ptr(), x.data_ptr(), other.data_ptr())
        launch(-(-fours // _THREADS), raw_stream()(index), *pointers, fours)

    numbers = torch.arange(1 << 16, device=x.device).to(torch.int16).view(x.dtype).nan_to_num()
    other = pattern(tuple(numbers.shape), x.dtype, x.device)
    out = torch.full_like(numbers, float("nan"))
    launched(out, numbers, other)
    require_equal(out, activation(numbers) * other)
    return launched
