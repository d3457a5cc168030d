"""Decoder layers offloaded to the CPU are copied to the GPU tensor by tensor, while it waits.

accelerate copies the tensors of a module to the GPU one by one.  After each copy it returns all
memory that PyTorch's allocator has cached to the driver.  A bfloat16 ``nn.Linear`` has one tensor.
A 4-bit one has up to six, most of them tiny, each copied from pageable memory while the GPU waits.
So 4-bit layers are slower than bfloat16 ones.

The fix stores the tensors of a decoder layer in one block of page-locked host memory.  When the
first module of a layer is about to run, one copy transfers the block.  While a layer computes, the
next two layers are copied on a separate stream.  For their forward, the modules get parameters that
are views of the block.  Then they get their meta parameters back, and nothing is copied to the
host.  A decode step that is captured as a CUDA graph contains the copies.

This applies to layers with 4-bit weights in host memory.  It also applies to Gemma's 8-bit and
unquantised layers if they may be page-locked (``gemma4_compat.limit_page_locked``).  At most three
layers are on the GPU at a time, and none after a forward.  accelerate itself loads a module whose
tensors were replaced.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Kind, Patch, broken, fixed
from ...objects import View
from ...runtime.host.blocks import add, part_of
from .._code import code_at

PATCH = Patch(
    name="offload_streaming",
    kind=Kind.SPEED,
    symptom="4-bit layers offloaded to the CPU are slower than bfloat16 ones",
    affects=("transformers", "accelerate"),
    changes=(
        "AlignDevicesHook copies decoder layers with 4-bit weights, and all layers of Gemma 4 and "
        "3n, from page-locked host memory to the GPU, with one copy per layer and ahead of time."
    ),
    unreported="Only slow, not wrong; no report is known upstream.",
)


@PATCH.probe
def tensors_travel_one_by_one() -> Finding:
    """Look whether the hook still sets the tensors one by one."""
    code = code_at("accelerate.hooks", "AlignDevicesHook.pre_forward")
    if "set_module_tensor_to_device" in code.co_names:
        return broken()
    return fixed("AlignDevicesHook no longer sets the tensors one by one")


@PATCH.around("accelerate.hooks", "AlignDevicesHook.init_hook")
def align_devices_hook_init_hook(original: Any, self: Any, module: Any) -> Any:
    module = original(self, module)
    add(self, module)
    return module


@PATCH.around("accelerate.hooks", "AlignDevicesHook.pre_forward")
def align_devices_hook_pre_forward(
    original: Any, self: Any, module: Any, *args: Any, **kwargs: Any
) -> Any:
    import torch

    part = part_of(self)
    if part is None or torch.compiler.is_compiling() or not part.place(self, module):
        return original(self, module, *args, **kwargs)
    self.tied_pointers_to_remove = set()
    return original(View(self, offload=False), module, *args, **kwargs)


@PATCH.around("accelerate.hooks", "AlignDevicesHook.post_forward")
def align_devices_hook_post_forward(original: Any, self: Any, module: Any, output: Any) -> Any:
    part = part_of(self)
    if part is None:
        return original(self, module, output)
    if not part.put_back(module):
        output = original(self, module, output)
        part.return_to(module)
        return output
    return original(View(self, offload=False), module, output)
