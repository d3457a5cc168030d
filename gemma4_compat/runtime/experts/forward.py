"""The forward of a module with experts in 4 bits."""

from __future__ import annotations

import dis
import logging
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

from ...objects import View
from .kernel import has_usual_gate, routed
from .lent import Lent, is_watched
from .packed import FUSED, Packed, packed_parameters
from .update import Update, updates

logger = logging.getLogger(__name__)


class Upstream:
    """The forward of a class of experts, and the functions of transformers that it chooses from.

    Only these functions have faster equivalents here.  Any other function is a user's: it is called
    in every forward, with the dequantized weights.

    Args:
        forward: the class's.
        is_measured: whether the kernels for a few tokens compute what these functions compute.
    """

    def __init__(self, forward: Callable[..., Any], is_measured: bool = True) -> None:
        from transformers.integrations import moe

        self.forward, self.is_measured = forward, is_measured
        self.registered = moe.ALL_EXPERTS_FUNCTIONS
        self.batched = moe.batched_mm_experts_forward
        self.grouped = moe.grouped_mm_experts_forward
        functions = forward, self.batched, self.grouped
        self.is_known = all(getattr(f, "__globals__", None) is vars(moe) for f in functions)
        self._module, self._in_turn = moe, self.is_known and _read(self.grouped) == _IN_TURN

    def reads_in_turn(self) -> bool:
        """Whether the grouped function is through with a fused tensor when it reads the next one.

        Functions that a user put in place of transformers', and his modes, may keep a tensor.
        """
        names = vars(self._module)
        products = (names.get(name) for name in ("_grouped_linear", "_grouped_mm"))
        known = all(getattr(each, "__globals__", None) is names for each in products)
        return self._in_turn and known and not is_watched()

    def chosen(self, module: Any) -> str | None:
        """The name of the function of transformers that runs; ``None`` if it is another one."""
        if not self.is_known:
            return None
        name = module.config._experts_implementation
        function = self.registered.get(name)
        if function is None:
            return "eager" if name in (None, "eager") else None
        if function is self.batched:
            return "batched_mm"
        return "grouped_mm" if function is self.grouped else None


#: what a function reads and calls that is through with a fused tensor when it reads the next one
_IN_TURN = [name for tensor in FUSED for name in (tensor, "_grouped_linear")]


def _read(function: Any) -> list[str]:
    names = [each.argval for each in dis.get_instructions(function)]
    return [name for name in names if name in _IN_TURN]


def forward_4bit(
    upstream: Upstream, module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any
) -> Any:
    """The forward of a module with experts in 4 bits."""
    import torch

    known = getattr(updates, "of", {})
    changed = {name: known[id(module), name] for name in FUSED if (id(module), name) in known}
    dtype = getattr(module, "compute_dtype", None) or hidden_states.dtype
    packed = {
        name: Packed(parameter, dtype) for name, parameter in packed_parameters(module).items()
    }
    inputs = hidden_states.to(dtype), top_k_index, top_k_weights
    chosen = upstream.chosen(module)
    trains = hidden_states.requires_grad or top_k_weights.requires_grad
    if (
        chosen is not None
        and all(each.factors and not each.trains() for each in changed.values())
        and not (trains and torch.is_grad_enabled())
        and len(packed) == len(FUSED)
        and has_usual_gate(module)  # another one may read the fused tensors
    ):
        gates = not changed and upstream.is_measured
        if gates and (output := routed(module, packed, *inputs)) is not None:
            return output.to(hidden_states.dtype)
        in_rows = all(each.rows_are_blocks() for each in packed.values())
        if gates and len(hidden_states) == 1 and in_rows:
            return _one_token(module, packed, *inputs).to(hidden_states.dtype)
        # The loop over the experts, "eager", needs to know their numbers.
        few = 0 < 2 * top_k_index.numel() <= packed[FUSED[0]].shape[0]
        if few and chosen != "eager":
            routed_to = {name: _Routed(each, changed.get(name)) for name, each in packed.items()}
            return upstream.batched(View(module, **routed_to), *inputs).to(hidden_states.dtype)
    return _whole(upstream, chosen, module, packed, changed, inputs).to(hidden_states.dtype)


def _one_token(
    module: Any, packed: dict[str, Packed], inputs: Any, indices: Any, weights: Any
) -> Any:
    """Two products with a matrix in 4 bits: of all gates and ups, and of all downs.

    The products with the second matrix add up the experts, so its inputs are weighted.
    """
    from bitsandbytes import matmul_4bit

    indices = indices.reshape(-1)
    matrix, state = packed["gate_up_proj"].stacked(indices)
    inner = matmul_4bit(inputs, matrix.t(), quant_state=state).view(len(indices), -1)
    inner = module._apply_gate(inner) * weights.reshape(-1, 1)
    matrix, state = packed["down_proj"].stacked_inputs(indices)
    inner = inner.to(inputs.dtype).view(1, -1)
    return matmul_4bit(inner, matrix.t(), quant_state=state)


def _whole(
    upstream: Upstream, chosen: str | None, module: Any, packed: Any, updates: Any, inputs: Any
) -> Any:
    """The output, from fused tensors that are dequantized when they are read.

    Autograd gets them dequantized again in the backward.
    """
    function, settings = upstream.forward, {}
    if chosen in ("batched_mm", "grouped_mm"):
        function = upstream.grouped  # batched_mm copies an expert's weights for each of its tokens
        if not _has_grouped_kernel(inputs[0]) and "eager" not in upstream.registered:
            _say_looped(str(inputs[0].dtype))
            function, chosen = upstream.forward, "eager"
            settings["config"] = View(module.config, _experts_implementation="eager")
    lent = Lent(function is upstream.grouped and upstream.reads_in_turn())
    stand_in = _Dequantizing(module, packed, updates, lent, chosen, **settings)
    with lent.hooks():
        return function(stand_in, *inputs)


def _has_grouped_kernel(inputs: Any) -> bool:
    """CUDA's kernel multiplies bfloat16 only."""
    import torch

    return bool(inputs.device.type != "cuda" or inputs.dtype == torch.bfloat16)


@cache
def _say_looped(dtype: str) -> None:
    logger.warning(
        "the 4-bit experts compute in %s (bnb_4bit_compute_dtype), for which CUDA has no grouped "
        "matrix product: the experts are computed one after the other, as with "
        "experts_implementation='eager'.  torch.bfloat16 is faster on GPUs that compute in it.",
        dtype.removeprefix("torch."),
    )


class _Routed:
    """Stands in for a fused tensor; dequantizes the experts that it is indexed with."""

    def __init__(self, packed: Packed, update: Update | None) -> None:
        self._packed, self._update = packed, update

    def __getitem__(self, index: Any) -> Any:
        weight = self._packed.several(index)
        return weight if self._update is None else self._update.added_to(weight, index)


class _OneByOne:
    """Stands in for a fused tensor; dequantizes the one expert that it is indexed with."""

    def __init__(self, packed: Packed, lent: Lent) -> None:
        self._packed, self._lent = packed, lent

    def __getitem__(self, index: Any) -> Any:
        number = int(index)
        return self._lent.lend(self._packed, number)


#: Methods of ``torch.nn.Module`` that a user's function may read the fused tensors with.
_READ_PARAMETERS = ("parameters", "named_parameters", "named_modules", "_named_members")


class _Dequantizing(View):
    """Stands in for the module; its fused tensors are dequantized whenever they are read.

    A user's function, which may read a tensor for each expert, gets the same one during its call.
    """

    def __init__(
        self, module: Any, packed: Any, updates: Any, lent: Any, chosen: Any, **settings: Any
    ) -> None:
        own = {"_packed": packed, "_updates": updates, "_lent": lent, "_chosen": chosen}
        super().__init__(module, _read={}, **own, **settings)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The module's, for ``super()`` in a user's method."""
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        import torch

        packed = self._packed.get(name) if name in FUSED else None
        if packed is None:
            if name == "_parameters":
                return {**self._module._parameters, **{key: getattr(self, key) for key in FUSED}}
            if name in _READ_PARAMETERS:
                return getattr(type(self._module), name).__get__(self)
            value = super().__getattr__(name)
            bound = isinstance(value, MethodType) and value.__self__ is self._module
            if bound and not hasattr(torch.nn.Module, name):  # a user's may read fused tensors
                return MethodType(value.__func__, self)
            return value
        if name in self._read:
            return self._read[name]
        update = self._updates.get(name)
        if update is not None:
            if update.factors and self._chosen in ("batched_mm", "grouped_mm"):
                return self._lent.lend_sum(packed, update)
            self._read[name] = update.add(packed.whole())
            return self._read[name]
        if self._chosen == "eager":
            return _OneByOne(packed, self._lent)
        weight = self._lent.lend(packed)
        if self._chosen is None:
            self._read[name] = weight
        return weight
