"""Offloading a 4-bit weight destroys its quant state.

``Params4bit.to("meta")`` calls ``QuantState.to("meta")``, which moves the one shared quant state
*in place*.  absmax, code, offset and the nested state lose their values for every holder, including
the weight that comes back from the host.  ``QuantState.as_dict`` (``self.offset.item()``) is only
the first code that fails on a nested state.

This hides a second bug.  On a CPU with AVX512-BF16, the first ``Linear4bit.forward`` repacks weight
and quant state for the CPU.  The offload hook then restores the *unpacked* weight beside the
*packed* state.  No exception is raised, and the logits are wrong from the second forward on.

The fix keeps a *host* state per offloaded weight.  It is made when the weight is first moved to
meta, and nothing changes it afterwards.  Whenever the weight is moved to a real device, it gets its
own *execution* state, copied from the host state.  When the weight is offloaded again, a shallow
copy of the host state replaces the execution state.  So nothing is copied back from the device, a
repacked state is dropped with the repacked weight, and an execution state that autograd still holds
stays intact until backward.  A forward while the patch is off destroys the shallow copy, or a
packed copy of it, and never the host state: the second such forward fails, and forwards work again
with the patch.  If a quant state has really lost its values (for example before this package was
imported), an error names the module.
"""

from __future__ import annotations

import copy
import logging
from typing import Any
from weakref import WeakValueDictionary

from ...engine import Finding, Patch, broken, fixed
from ...errors import ModelError
from ...model.quant_state import HOST

#: On a host state: its shallow copy.
_COPY = "_offload_copy"
#: ``id`` of a host state -> the host state
_hosts: WeakValueDictionary[int, Any] = WeakValueDictionary()

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="quant_state_offload",
    symptom=(
        "Tensor.item() cannot be called on meta tensors (nested quantization), or Cannot copy out "
        "of meta tensor; no data! (single quantization), when 4-bit weights are offloaded"
    ),
    affects=("transformers", "accelerate", "bitsandbytes"),
    links=(
        "https://github.com/huggingface/transformers/issues/43873",
        "https://github.com/EricRollei/Comfy_HunyuanImage3/issues/5",
    ),
)


@PATCH.probe
def meta_destroys_shared_state() -> Finding:
    """Move a tiny quantized parameter to meta, and check the state of the original."""
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn.modules import Params4bit

    state = QuantState(absmax=torch.ones(1), code=torch.ones(16), blocksize=64)
    packed = torch.zeros(32, 1, dtype=torch.uint8)
    Params4bit(packed, quant_state=state, bnb_quantized=True).to("meta")
    return broken() if state.absmax.is_meta else fixed("to('meta') keeps the quant state")


@PATCH.on_revert
def warn_of_offloaded_weights() -> None:
    if _hosts:
        logger.warning(
            "quant_state_offload is off now, while models with offloaded 4-bit weights are loaded. "
            "Do not run these models before it is on again: without it, the second forward raises "
            "an error."
        )


@PATCH.around("bitsandbytes.nn.modules", "Params4bit.to")
def params4bit_to(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    state = self.quant_state
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    if state is None or device is None:
        return original(self, *args, **kwargs)
    host = vars(state).get(HOST)
    if device.type == "meta":
        if host is not None or not _lost(state):
            state = _for_meta(host or _copied_to(state, "cpu"))
    elif host is not None and (_is_of_meta(state, host) or _is_stale(state, self)):
        state = _copied_to(host, device)
        setattr(state, HOST, host)
    elif _lost(state):
        raise ModelError(_lost_values(f"a 4-bit weight of shape {tuple(state.shape or ())}"))
    else:
        return original(self, *args, **kwargs)
    # The original would move the state in place, so it gets a weight without a state.
    bare = torch.Tensor._make_subclass(type(self), self.data, self.requires_grad)
    vars(bare).update(vars(self), quant_state=None)
    moved = original(bare, *args, **kwargs)
    moved.quant_state = state
    return moved


@PATCH.around("bitsandbytes.nn.modules", "Linear4bit._save_to_state_dict")
def linear4bit_save_to_state_dict(
    original: Any, self: Any, destination: Any, prefix: str, keep_vars: bool
) -> Any:
    _require_values(self, prefix.rstrip("."))
    return original(self, destination, prefix, keep_vars)


@PATCH.around("accelerate.hooks", "AlignDevicesHook.init_hook")
@PATCH.around("accelerate.hooks", "AlignDevicesHook.detach_hook")
def init_or_detach_hook(original: Any, self: Any, module: Any) -> Any:
    module = original(self, module)
    _share_state_with_modules(self, module)
    return module


def _for_meta(host: Any) -> Any:
    """The state of a weight on meta: a shallow copy of the host state, always the same one."""
    shallow = vars(host).get(_COPY)
    if shallow is None:
        shallow = _copied_to(host, "cpu")
        setattr(shallow, HOST, host)
        setattr(host, _COPY, shallow)
        _hosts[id(host)] = host
    elif shallow.absmax is not host.absmax:  # a forward without the patch, which may have packed it
        shallow.__dict__ = {**vars(_copied_to(host, "cpu")), HOST: host}
    return shallow


def _is_of_meta(state: Any, host: Any) -> bool:
    """Whether a state is the one of the weight on meta, or was moved there without the patch."""
    return vars(host).get(_COPY) is state or _lost(state)


def _is_stale(state: Any, weight: Any) -> bool:
    """Whether a state was packed for the CPU and this weight was not.

    An interrupted forward leaves its packed state, and the next forward loads the weight again.
    """
    is_packed = getattr(state, "packing_format_for_cpu", False)
    return bool(is_packed) and weight.shape == state.original_qshape


def _copied_to(state: Any, device: Any) -> Any:
    """A new quant state on ``device``; tensors that are on this device already are shared."""
    new = copy.copy(state)
    if getattr(new, "state2", None) is not None:
        new.state2 = copy.copy(new.state2)
    vars(new).pop(_COPY, None)
    new.to(device)
    return new


def _lost(state: Any) -> bool:
    return bool(state.absmax.is_meta)


def _require_values(module: Any, name: str) -> None:
    state = getattr(module.weight, "quant_state", None)
    host = None if state is None else vars(state).get(HOST)
    if host is not None and _is_of_meta(state, host):
        module.weight.quant_state = _for_meta(host)
    elif state is not None and _lost(state):
        raise ModelError(_lost_values(name or module))


def _lost_values(owner: Any) -> str:
    return (
        f"the quant state of {owner} has no values: it was moved to the meta device before "
        f"gemma4_compat was imported, or was never loaded.  Import gemma4_compat first, then load "
        f"the model again.  gemma4_compat.inspection.inspect_model(model) lists damaged layers."
    )


def _share_state_with_modules(hook: Any, module: Any) -> None:
    """Replace bitsandbytes' reference on the module, which would keep the device memory in use."""
    if not hook.offload:
        return
    prefix = getattr(hook.weights_map, "prefix", "").rstrip(".")
    for name, child in module.named_modules() if hook.place_submodules else [("", module)]:
        weight = child._parameters.get("weight")
        if getattr(weight, "quant_state", None) is None:
            continue
        _require_values(child, ".".join(filter(None, (prefix, name))))
        if getattr(child, "quant_state", None) is not None:
            child.quant_state = weight.quant_state
