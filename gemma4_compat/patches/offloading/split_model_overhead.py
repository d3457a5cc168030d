"""Every module of a split model spends time on moving inputs that are in place already.

Under a device map accelerate puts a hook on each module with weights, some 18 a decoder layer.
Most rest on the device that they compute on, and so do their inputs.  Still every call goes through
``send_to_device``, which examines each input, and twice through a wrapper that keeps torch.compile
out.  A model that decodes a token in 50 ms loses a tenth to that.

The fix calls a module's own forward at once where that is what the hook would come to: for a module
that is not offloaded, with tensors on its device and values that have none.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from functools import cache, partial, update_wrapper, wraps
from typing import Any
from weakref import ref

from ...engine import Finding, Kind, Patch, broken, fixed

PATCH = Patch(
    name="split_model_overhead",
    kind=Kind.SPEED,
    symptom="a model under a device map decodes a tenth slower than on one GPU, offloading aside",
    affects=("transformers", "accelerate"),
    changes=(
        "A module that accelerate hooks computes without going through its hook where its weights "
        "and inputs are on the execution device and its outputs stay there."
    ),
    unreported=("Only slow, not wrong; no report is known upstream."),
)

#: What ``send_to_device`` hands on as it is.
_PLAIN = (type(None), bool, int, float, str)


@PATCH.probe
def inputs_are_always_sent() -> Finding:
    """Look whether the hook asks anything before it sends."""
    import inspect

    from accelerate.hooks import AlignDevicesHook

    code = inspect.unwrap(AlignDevicesHook.pre_forward).__code__
    if "send_to_device" in code.co_names:
        return broken()
    return fixed("AlignDevicesHook.pre_forward does not call send_to_device")


@PATCH.replaces("accelerate.hooks", "add_hook_to_module")
def add_hook_to_module(original: Any) -> Any:
    from accelerate.hooks import AlignDevicesHook
    from torch import Tensor
    from torch.compiler import is_dynamo_compiling

    @wraps(original)
    def add_hook_to_module(module: Any, *args: Any, **kwargs: Any) -> Any:
        module = original(module, *args, **kwargs)
        hooked = module.__dict__.get("forward")
        if hooked is not None and idle(module._hf_hook):
            module.forward = update_wrapper(partial(forward, module, hooked), module._old_forward)
        return module

    methods_are_known = _Known(AlignDevicesHook, "pre_forward", "post_forward")

    def idle(hook: Any) -> bool:
        if type(hook) is not AlignDevicesHook:
            return False
        if hook.offload or hook.io_same_device or hook.no_grad:
            return False
        # Somebody may have replaced what the hook does.
        own = hook.__dict__
        return not ("pre_forward" in own or "post_forward" in own) and bool(methods_are_known)

    def forward(module: Any, hooked: Any, /, *args: Any, **kwargs: Any) -> Any:
        hook = module._hf_hook  # somebody may have changed it since
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
            # one that moves its tensors in place
            return isinstance(value, UserDict) and are_on(device, value.data.values())
        return not isinstance(value, (tuple, list, Mapping))

    return add_hook_to_module


class _Known:
    """Whether methods of a class are accelerate's, perhaps in replacements of this package.

    It keeps no reference to them: others may take theirs back.
    """

    def __init__(self, owner: type, *names: str) -> None:
        self.owner, self.names = owner, names
        self.asked: list[Any] = []
        self.answer = False

    def __bool__(self) -> bool:
        owner = self.owner
        for name, method in self.asked:
            if getattr(owner, name) is not method():
                break
        else:
            if self.asked:
                return self.answer
        methods = [getattr(owner, name) for name in self.names]
        self.asked = [(name, ref(method)) for name, method in zip(self.names, methods, strict=True)]
        self.answer = all(_is_known(method) for method in methods)
        return self.answer


def _is_known(function: Any) -> bool:
    known = (__name__.partition(".")[0], "accelerate", "torch")
    while function is not None:
        # ``functools.wraps`` copies the name of the module, but not the globals.
        if function.__globals__["__name__"].partition(".")[0] not in known:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@cache
def _device(device: Any) -> Any | None:
    """The one device that is meant; ``None`` where that may change, as with "cuda"."""
    import torch

    if device is None:
        return None
    device = torch.device(device)
    return device if device.type == "cpu" or device.index is not None else None
