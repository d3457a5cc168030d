"""A static cache with ``prefill_chunk_size`` gets one head size for all layers.

transformers 5.13 allocates the keys and values of a static cache before a prefill in chunks, so
that ``torch.compile`` need not compile the next call anew.  It asks the config for the number of
heads and their size.  The full-attention layers of Gemma 4 have larger heads than the sliding
layers, in some models also fewer of them.  transformers 5.13 and 5.14 allocate too little, and the
first forward raises; from 5.15 on, the config refuses to name a single size.

The fix leaves the allocation to the first forward, as transformers does for models on several
devices, and as releases before 5.13 do for all.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from ...engine.probing import code_at, mentions
from ...model.parts import is_ours

PATCH = Patch(
    name="static_cache_head_sizes",
    symptom=(
        'generate(cache_implementation="static", prefill_chunk_size=...) raises: '
        "'head_dim' is a per-layer attribute and may vary across layers; or index_copy_(): "
        "Source/destination tensor must have same slice shapes"
    ),
    affects=("transformers>=5.13,<5.18",),
    links=(
        "https://github.com/huggingface/transformers/issues/48501",
        "https://github.com/huggingface/transformers/pull/48619",
    ),
)

_GENERATION = "transformers.generation.utils"
_SHAPE = "GenerationMixin._get_static_cache_init_shape"


@PATCH.probe
def one_head_size_for_all_layers() -> Finding:
    """Check whether the shape of the layers is that of the whole config."""
    code = code_at(_GENERATION, _SHAPE)
    if mentions(code, "get_head_shapes"):
        return fixed("transformers asks for the head size of each layer")
    if not mentions(code, "head_dim"):
        return drifted(f"{_SHAPE} does not read head_dim")
    return broken()


@PATCH.around(_GENERATION, _SHAPE)
def get_static_cache_init_shape(original: Any, self: Any) -> Any:
    return None if is_ours(self) else original(self)
