"""An offloaded 8-bit layer keeps its weight on the GPU, and its backward fails.

``Linear8bitLt.forward`` stores weight and scales in the layer's ``MatmulLtState``: ``CB`` and
``SCB``.  The backward reads both from the same state.  After the forward of an offloaded layer,
``AlignDevicesHook.post_forward`` removes ``SCB`` from this state, so the backward has no scales.
It does not remove ``CB``, which keeps the weight in GPU memory until the next forward: offloading
8-bit layers saves no GPU memory.

The fix removes both.  With gradients enabled, the layer gets a new state first.  Autograd keeps the
old state, which stays complete, for as long as the backward needs it.

bitsandbytes 0.47.0 to 0.48.1 are left out: there offloaded 8-bit layers raise anyway, because their
weights come back from the meta device incomplete.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at
from ...runtime.host.int8_state import clear_state

PATCH = Patch(
    name="int8_offload_state",
    symptom=(
        "AttributeError: 'NoneType' object has no attribute 'unsqueeze' in the backward of 8-bit "
        "layers that are offloaded; their weights stay on the GPU after the forward"
    ),
    affects=("transformers", "accelerate", "bitsandbytes!=0.47.*,!=0.48.0,!=0.48.1"),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def hook_empties_the_state() -> Finding:
    """Look what the hook removes from the state of a layer."""
    code = code_at("accelerate.hooks", "AlignDevicesHook.post_forward")
    alone = "SCB" in code.co_names and "CB" not in code.co_names
    return fixed_if(not alone, "AlignDevicesHook no longer removes the scales alone")


@PATCH.around("accelerate.hooks", "AlignDevicesHook.post_forward")
def align_devices_hook_post_forward(original: Any, self: Any, module: Any, output: Any) -> Any:
    if self.offload and type(module).__name__ == "Linear8bitLt":
        clear_state(module)
    return original(self, module, output)
