"""Every module of a split model spends time on moving inputs that are in place already.

Under a device map accelerate puts a hook on each module with weights, some 19 a decoder layer.
Most rest on the device that they compute on, and so do their inputs.  Still every call goes through
``send_to_device``, which examines each input, and twice through a wrapper that keeps torch.compile
out.  A model that decodes a token in 50 ms loses a tenth to that.

The fix hands inputs and outputs on as they are where that is what the hook would do: for a module
that is not offloaded, with tensors on its device and plain values.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from functools import cache, wraps
from typing import Any

from ..engine import Finding, Patch, broken, fixed

PATCH = Patch(
    name="split_model_overhead",
    symptom="a model under a device map decodes a tenth slower than on one GPU, offloading aside",
    affects=(("transformers>=5.5", "accelerate>=1.10"),),
    changes=(
        "AlignDevicesHook.pre_forward and post_forward return at once where a module's weights and "
        "inputs are on its execution device and its outputs stay there."
    ),
    ends="not fixed upstream as of accelerate 1.15.0",
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


@PATCH.replaces("accelerate.hooks", "AlignDevicesHook.pre_forward")
def align_devices_hook_pre_forward(original: Any) -> Any:
    from torch import Tensor
    from torch.compiler import is_dynamo_compiling as is_compiling

    @wraps(original)
    def pre_forward(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.offload or self.io_same_device or is_compiling()):
            device = _device(self.execution_device)
            if device is not None and are_on(device, args):
                if not kwargs or are_on(device, kwargs.values()):
                    return args, kwargs
        return original(self, module, *args, **kwargs)

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
        if isinstance(value, UserDict) and hasattr(value, "to"):  # moves its tensors in place
            return are_on(device, value.values())
        return not (hasattr(value, "to") or isinstance(value, (tuple, list, Mapping)))

    return pre_forward


@PATCH.replaces("accelerate.hooks", "AlignDevicesHook.post_forward")
def align_devices_hook_post_forward(original: Any) -> Any:
    from torch.compiler import is_dynamo_compiling as is_compiling

    @wraps(original)
    def post_forward(self: Any, module: Any, output: Any) -> Any:
        if self.offload or self.io_same_device or is_compiling():
            return original(self, module, output)
        return output

    return post_forward


@cache
def _device(device: Any) -> Any | None:
    """The one device that is meant; ``None`` where that may change, as with "cuda"."""
    import torch

    if device is None:
        return None
    device = torch.device(device)
    return device if device.type == "cpu" or device.index is not None else None
