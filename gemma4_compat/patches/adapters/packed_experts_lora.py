"""PEFT cannot adapt experts that are stored in 4 bits.

For the names in ``target_parameters``, PEFT adds the update of an adapter to the parameter itself:
it registers a parametrisation that returns ``weight + update``.  It takes the shape, the dtype and
the device of the adapter from the parameter.  A parameter in 4 bits is a column of bytes, so the
adapter gets wrong shapes, and the first forward raises.

The fix lets PEFT read the shape and the dtype of the dequantized weight.  In a forward, the experts
get the update and add it to the weight that they dequantize.  Merging dequantizes, adds the update
and quantizes again, as PEFT does for 4-bit layers.  A copy that ``modules_to_save`` trains is
dequantized: bytes have no gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ...errors import RefusedError
from ...model.hooks import execution_device
from ...objects import hidden, shadowed
from ...runtime.experts.packed import Packed, dequantize, experts_in, is_packed, quantized
from ...runtime.experts.update import Update, updates
from ...runtime.host.onloading import onloaded

PATCH = Patch(
    name="packed_experts_lora",
    symptom=(
        "LoRA with target_parameters on experts in 4 bits: Registering a parametrization may not "
        "change the dtype of the tensor, or Expected mat_a to be Float32, BFloat16 or Float16 "
        "matrix, got Byte"
    ),
    affects=("transformers", "peft", "bitsandbytes"),
    unreported="Only fused_experts_4bit, a patch of this package, stores experts in 4 bits.",
    requires=("fused_experts_4bit",),
)

_LAYER = "peft.tuners.lora.layer"


@PATCH.probe
def wrapper_reads_the_parameter() -> Finding:
    """Check whether PEFT's wrapper knows quantized parameters."""
    adapts = mentions(code_at(_LAYER, "ParamWrapper.get_param"), "quant_state")
    return fixed_if(adapts, "ParamWrapper adapts quantized parameters itself")


@PATCH.around("peft.utils.other", "ModulesToSaveWrapper.update")
def modules_to_save_update(
    original: Any, self: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    with ExitStack() as stack:
        for _, module in experts_in(self.original_module):
            copied = partial(_dequantized_copy, module)
            stack.enter_context(shadowed(module, __deepcopy__=copied))
        original(self, adapter_name, *args, **kwargs)


def _dequantized_copy(module: Any, memo: dict[int, Any]) -> Any:
    with hidden(module, "__deepcopy__"):
        copied = copy.deepcopy(module, memo)
    dequantize(copied)
    return copied


PATCH.copies(_LAYER, "ParamWrapper.get_param", "e1a89e443dac")
PATCH.copies(_LAYER, "ParamWrapper._activate_lora", "0eabfcf932d1 9366694e8a9e eaf8c9d1efec")
PATCH.copies(_LAYER, "ParamWrapper.merge", "005f8ad1fc18")
PATCH.copies(_LAYER, "ParamWrapper.unmerge", "f076f845f5a9")


@PATCH.around(_LAYER, "ParamWrapper.get_param")
def get_param(original: Any, self: Any) -> Any:
    parameter = _packed(self)
    return original(self) if parameter is None else _stand_in(self, parameter)


@PATCH.around(_LAYER, "ParamWrapper._activate_lora")
@contextmanager
def activate_lora(original: Any, self: Any, active_adapters: Any) -> Iterator[None]:
    adapters = [name for name in active_adapters or () if name in self.lora_A]
    if not adapters or _packed(self) is None:
        with original(self, active_adapters):
            yield
        return
    outer = getattr(updates, "of", {})
    key = id(self.get_base_layer()), self.parameter_name
    updates.of = {**outer, key: _update(self, adapters)}
    try:
        yield
    finally:
        updates.of = outer


@PATCH.around(_LAYER, "ParamWrapper.merge")
def merge(original: Any, self: Any, safe_merge: bool = False, adapter_names: Any = None) -> Any:
    if _packed(self) is None:
        return original(self, safe_merge, adapter_names)
    from peft.tuners.tuners_utils import check_adapters_to_merge

    for name in check_adapters_to_merge(self, adapter_names):
        if name in self.lora_A:
            _add(self, name, 1, safe_merge)
            self.merged_adapters.append(name)
    return None


@PATCH.around(_LAYER, "ParamWrapper.unmerge")
def unmerge(original: Any, self: Any) -> Any:
    if _packed(self) is None or not self.merged:
        return original(self)
    while self.merged_adapters:
        name = self.merged_adapters.pop()
        if name in self.lora_A:
            _add(self, name, -1)
    return None


def _packed(wrapper: Any) -> Any | None:
    """The adapted parameter, if it holds experts in 4 bits."""
    parameter = wrapper.get_base_layer()._parameters.get(wrapper.parameter_name)
    return parameter if is_packed(parameter) else None


def _stand_in(wrapper: Any, parameter: Any) -> Any:
    """A tensor with the shape, dtype and device of the dequantized weight; it has one value."""
    import torch

    experts, state = wrapper.get_base_layer(), parameter.quant_state
    dtype = getattr(experts, "compute_dtype", None) or state.dtype
    device = execution_device(experts) or parameter.device
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(state.shape))


def _update(wrapper: Any, adapters: list[str]) -> Update:
    """What these adapters add to a weight."""
    import torch

    factors = None
    has_factors = hasattr(wrapper, "get_delta_factors") and wrapper.num_experts > 1
    if len(adapters) == 1 and has_factors:  # as PEFT >= 0.21 adds it
        factors = partial(wrapper.get_delta_factors, adapters[0])

    def add(weight: Any) -> Any:
        if factors is not None:
            left, right, scaling = factors()
            with torch.autocast(weight.device.type, enabled=False):
                return torch.baddbmm(weight, left, right, alpha=scaling)
        first, *others = (wrapper.get_delta_weight(name) for name in adapters)
        return weight + sum(others, start=first)

    return Update(add, factors)


def _add(wrapper: Any, adapter: str, sign: int, safe: bool = False) -> None:
    """Add an adapter's update to the weight, or subtract it, and quantize the sum."""
    import torch

    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    with torch.no_grad(), onloaded(experts, keep_changes=True):
        before = experts._parameters[name]
        weight = Packed(before).whole()
        weight += sign * wrapper.get_delta_weight(adapter).to(weight)
        if safe and not weight.isfinite().all():
            raise RefusedError(
                f"NaNs detected in the merged weights. The adapter {adapter} seems to be broken"
            )
        experts._parameters[name] = quantized(weight, before)
