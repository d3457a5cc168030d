"""The CPU waits for the GPU at each full sliding layer of a static cache, in every decode step.

``StaticSlidingWindowLayer.update`` makes the index of the last position from a Python list in each
step: ``torch.tensor([-1], device=...)``.  This is a copy from pageable memory, so the CPU waits
until the GPU has finished all its earlier work.  A CUDA graph cannot contain such a copy.

The fix builds the same keys and values without an index: it moves them one position to the left and
puts the new ones at the end.  Under torch.compile, which needs the index, upstream's code runs.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_at

PATCH = Patch(
    name="static_cache_full_window",
    kind=Kind.EXACT,
    symptom=(
        "a static cache decodes slower once the context is longer than the sliding window; "
        "operation not permitted when stream is capturing"
    ),
    affects=("transformers",),
    unreported=("It is slow, but not wrong; no report is known upstream."),
)


PATCH.copies("transformers.cache_utils", "StaticSlidingWindowLayer.update", "c2b5049fed6a")


@PATCH.probe
def full_window_needs_an_index() -> Finding:
    """Check whether the code of ``update`` creates a tensor."""
    code = code_at("transformers.cache_utils", "StaticSlidingWindowLayer.update")
    has_index = "tensor" in code.co_names
    return fixed_if(not has_index, "StaticSlidingWindowLayer.update makes no index tensor")


@PATCH.around("transformers.cache_utils", "StaticSlidingWindowLayer.update")
def static_sliding_window_layer_update(
    original: Any, self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
) -> Any:
    import torch

    if (
        key_states.shape[-2] != 1
        or not self.is_initialized
        or self.cumulative_length_int < self.max_cache_len
        or torch.compiler.is_compiling()
    ):
        return original(self, key_states, value_states, *args, **kwargs)
    self.cumulative_length_int += 1
    for own, new in ((self.keys, key_states), (self.values, value_states)):
        own.copy_(torch.cat((own[:, :, 1:], new), dim=-2))
    return self.keys, self.values
