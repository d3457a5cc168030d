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

This applies to the layers of Gemma 4 and 3n in host memory; to 8-bit and unquantized ones if they
may be page-locked (``gemma4_compat.limit_page_locked``).  At most three layers are on the GPU at a
time, and none after a forward.  accelerate itself loads a module whose tensors were replaced.
"""

from __future__ import annotations

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_at
from ...runtime.host.blocks import Blocks
from ._dispatched import use

PATCH = Patch(
    name="offload_streaming",
    kind=Kind.EXACT,
    symptom="4-bit layers offloaded to the CPU are slower than bfloat16 ones",
    affects=("transformers", "accelerate"),
    requires=("offload_threads",),
    unreported="Only slow, not wrong; no report is known upstream.",
)


@PATCH.probe
def tensors_travel_one_by_one() -> Finding:
    """Check whether the hook still sets the tensors one by one."""
    code = code_at("accelerate.hooks", "AlignDevicesHook.pre_forward")
    one_by_one = "set_module_tensor_to_device" in code.co_names
    return fixed_if(not one_by_one, "AlignDevicesHook no longer sets the tensors one by one")


use(PATCH, Blocks())
