"""Under eager attention the audio tower attends to what its mask forbids, and to nothing else.

The tower's attention is its own; it takes a mask whose true values are allowed.  The mask that
transformers makes for eager attention is another one: 0 is allowed, and the least value of the dtype
is forbidden.  The tower negates it as if it were boolean, so that all is inverted: each position
attends to padding and to what lies outside of its window.  No error, but other outputs than with
sdpa, whose masks are boolean.

The fix makes that mask boolean before the tower uses it.  The outputs are those of sdpa, bit for bit.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed

PATCH = Patch(
    name="audio_eager_mask",
    symptom=(
        'sound is heard wrongly with attn_implementation="eager", without an error: other outputs '
        "than with sdpa"
    ),
    affects=(("transformers>=5.5,<5.20",),),
    changes="Gemma4AudioModel makes the mask for eager attention boolean, as its attention expects.",
    ends="transformers 5.20.0",
)

_MODEL = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def tower_negates_its_mask() -> Finding:
    """Look at what the tower's attention does with a mask."""
    import inspect

    from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioAttention, Gemma4AudioModel

    if "logical_not" not in inspect.unwrap(Gemma4AudioAttention.forward).__code__.co_names:
        return fixed("the audio tower's attention does not negate its mask")
    if "finfo" in inspect.unwrap(Gemma4AudioModel._convert_4d_mask_to_blocked_5d).__code__.co_names:
        return drifted("the audio tower's masks are no longer filled with False")
    return broken()


@PATCH.replaces(_MODEL, "Gemma4AudioModel._convert_4d_mask_to_blocked_5d")
def convert_4d_mask_to_blocked_5d(original: Any) -> Any:
    @wraps(original)
    def _convert_4d_mask_to_blocked_5d(self: Any, mask_4d: Any) -> Any:
        return original(self, mask_4d == 0 if mask_4d.is_floating_point() else mask_4d)

    return _convert_4d_mask_to_blocked_5d
