"""Decoder layers offloaded to the CPU come to the GPU tensor by tensor, while it waits.

accelerate brings the tensors of a module to the GPU one by one, and after each gives all that
PyTorch's allocator has cached back to the driver.  A bfloat16 ``nn.Linear`` has one tensor; a 4-bit
one has up to six, most of them tiny, each copied from pageable memory while the GPU waits: 4-bit
layers are slower than bfloat16 ones.

The fix lays out the tensors of a decoder layer in one block of page-locked host memory, once.  When
the first module of a layer is about to run, the block goes over in one copy; while a layer
computes, the copies of the next two are on their way, on a stream of their own.  The modules get
parameters that are views of the block, for their forward; then they get their meta parameters
back.  Nothing is copied to the host.  A decode step that is captured as a CUDA graph holds the
copies.

Layers with 4-bit weights in host memory are treated so, and those of Gemma in 8 bits or unquantised
if they may be page-locked (``gemma4_compat.limit_page_locked``).  Three of them are on the GPU at a
time, none after a forward.  A module whose tensors somebody replaced is loaded as accelerate does
it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Kind, Patch, broken, fixed
from .._shadow import shadowed
from .._streaming import add, part_of, streamed_layers

PATCH = Patch(
    name="offload_streaming",
    kind=Kind.SPEED,
    symptom="4-bit layers offloaded to the CPU are slower than bfloat16 ones",
    affects=("transformers", "accelerate"),
    changes=(
        "AlignDevicesHook brings decoder layers with 4-bit weights, and all of Gemma 4 and 3n, "
        "from host memory in one copy each, from page-locked memory and ahead of time."
    ),
    unreported=("Only slow, not wrong; no report is known upstream."),
)


@PATCH.probe
def tensors_travel_one_by_one() -> Finding:
    """Look whether the hook still sets each tensor by itself."""
    import inspect

    from accelerate.hooks import AlignDevicesHook

    code = inspect.unwrap(AlignDevicesHook.pre_forward).__code__
    if "set_module_tensor_to_device" in code.co_names:
        return broken()
    return fixed("AlignDevicesHook no longer sets tensor by tensor")


@PATCH.replaces("accelerate.hooks", "AlignDevicesHook.init_hook")
def align_devices_hook_init_hook(original: Any) -> Any:
    @wraps(original)
    def init_hook(self: Any, module: Any) -> Any:
        module = original(self, module)
        add(self, module)
        return module

    return init_hook


@PATCH.replaces("accelerate.hooks", "AlignDevicesHook.pre_forward")
def align_devices_hook_pre_forward(original: Any) -> Any:
    import torch

    @wraps(original)
    def pre_forward(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        part = part_of(self)
        if part is None or torch.compiler.is_compiling() or not part.place(self, module):
            return original(self, module, *args, **kwargs)
        self.tied_pointers_to_remove = set()
        with shadowed(self, offload=False):
            return original(self, module, *args, **kwargs)

    return pre_forward


@PATCH.replaces("accelerate.hooks", "AlignDevicesHook.post_forward")
def align_devices_hook_post_forward(original: Any) -> Any:
    @wraps(original)
    def post_forward(self: Any, module: Any, output: Any) -> Any:
        part = part_of(self)
        if part is None or not part.put_back(module):
            return original(self, module, output)
        with shadowed(self, offload=False):
            return original(self, module, output)

    return post_forward


def page_locked(model: Any) -> int:
    """Bytes of a model's offloaded decoder layers that are page-locked for a GPU to copy."""
    layers = streamed_layers(model.modules())
    return sum(int(layer.host.nbytes) for layer in layers if layer.page_locked)
