"""DDP mixes up the rotary frequencies of the two kinds of layers.

``Gemma4TextRotaryEmbedding`` registers buffers for each kind of layer, in the order of a set of
strings.  This order differs from process to process, because Python seeds their hashes at random.
DDP copies the buffers of the first process to the others, in the order in which each has them.  In
half of all launches another process gets the frequencies of full attention for its sliding layers,
and the other way round.  There is no error, but its losses and gradients are wrong.

The fix sorts the buffers by name.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions

PATCH = Patch(
    name="rotary_buffer_order",
    symptom=(
        "under DDP, losses and gradients are wrong in about half of all launches, without an error"
    ),
    affects=("transformers<5.16",),
    unreported=("No report is known upstream; later releases sort the names."),
)

_MODULE = "transformers.models.gemma4.modeling_gemma4"
_INIT = "Gemma4TextRotaryEmbedding.__init__"


@PATCH.probe
def order_is_that_of_a_set() -> Finding:
    """Check whether the constructor sorts the kinds of layers."""
    return fixed_if(mentions(code_at(_MODULE, _INIT), "sorted"), "the kinds of layers are sorted")


@PATCH.around(_MODULE, _INIT)
def rotary_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    in_order = sorted(self._buffers.items())
    self._buffers.clear()
    self._buffers.update(in_order)
