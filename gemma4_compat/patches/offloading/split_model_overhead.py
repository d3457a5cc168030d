"""Every module of a split model spends time on moving inputs that are already on its device.

With a device map, accelerate attaches a hook to each module with weights, about 18 per decoder
layer.  Most weights are stored on the device that they compute on, and so are the inputs.  Still
every call runs ``send_to_device``, which examines each input, and passes twice through a wrapper
that disables torch.compile.  A model that decodes a token in 50 ms loses a tenth of its time to
this.

The fix calls the module's own forward directly if the hook would change nothing: the module is not
offloaded, its tensor inputs are on its device, and its other inputs have no device.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from functools import cache, partial, update_wrapper, wraps
from typing import Any
from weakref import ref

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_at
from ...runtime.kernels.watch import is_upstreams
from ._dispatched import copies_hooks

PATCH = Patch(
    name="split_model_overhead",
    kind=Kind.EXACT,
    symptom="with a device map, a model decodes 10 % slower than on one GPU, even if not offloaded",
    affects=("transformers", "accelerate"),
    unreported="Only slow, not wrong; no report is known upstream.",
)

#: Types of values that ``send_to_device`` passes on unchanged.
_PLAIN = (type(None), bool, int, float, str)


copies_hooks(PATCH)
PATCH.copies("accelerate.hooks", "add_hook_to_module", "fdf0697d66fd")


@PATCH.probe
def inputs_are_always_sent() -> Finding:
    """Check whether the hook still calls ``send_to_device``."""
    code = code_at("accelerate.hooks", "AlignDevicesHook.pre_forward")
    sends = "send_to_device" in code.co_names
    return fixed_if(not sends, "AlignDevicesHook.pre_forward does not call send_to_device")


@PATCH.replaces("accelerate.hooks", "add_hook_to_module")
def add_hook_to_module(original: Any) -> Any:
    from accelerate.hooks import AlignDevicesHook
    from torch import Tensor
    from torch.compiler import is_dynamo_compiling

    @wraps(original)
    def add_hook_to_module(module: Any, hook: Any, append: bool = False) -> Any:
        module = original(module, hook, append)
        hooked = module.__dict__.get("forward")
        if hooked is not None and idle(module._hf_hook):
            module.forward = update_wrapper(partial(forward, module, hooked), module._old_forward)
        return module

    def idle(hook: Any) -> bool:
        if type(hook) is not AlignDevicesHook:
            return False
        if hook.offload or hook.io_same_device or hook.no_grad:
            return False
        # The hook's methods may have been replaced on the instance.
        own = hook.__dict__
        return not ("pre_forward" in own or "post_forward" in own) and methods_are_known()

    # Weak references, because other code may restore methods of its own later.
    checked: tuple[Any, Any, bool] = (lambda: None, lambda: None, False)

    def methods_are_known() -> bool:
        nonlocal checked
        pre, post = AlignDevicesHook.pre_forward, AlignDevicesHook.post_forward
        if checked[0]() is not pre or checked[1]() is not post:
            checked = ref(pre), ref(post), is_upstreams(pre) and is_upstreams(post)
        return checked[2]

    def forward(module: Any, hooked: Any, /, *args: Any, **kwargs: Any) -> Any:
        hook = module._hf_hook  # read it again, because it may have been replaced
        if idle(hook) and not is_dynamo_compiling():
            device = _device(hook.execution_device)
            if device is not None and are_on(device, args):
                if not kwargs or are_on(device, kwargs.values()):
                    return module._old_forward(*args, **kwargs)
        return hooked(*args, **kwargs)

    def are_on(device: Any, values: Any) -> bool:
        for value in values:
            if isinstance(value, Tensor):
                if value.device != device:
                    return False
            elif type(value) is tuple:
                if not are_on(device, value):
                    return False
            elif type(value) not in _PLAIN and not stays(device, value):
                return False
        return True

    def stays(device: Any, value: Any) -> bool:
        if hasattr(value, "to"):
            # e.g. ``BatchEncoding``, which moves its tensors in place
            return isinstance(value, UserDict) and are_on(device, value.data.values())
        return not isinstance(value, (tuple, list, Mapping))

    return add_hook_to_module


@cache
def _device(device: Any) -> Any | None:
    """The device; ``None`` if it may change, as "cuda" without an index may."""
    import torch

    if device is None:
        return None
    device = torch.device(device)
    return device if device.type == "cpu" or device.index is not None else None
