"""The rotary embedding of Gemma 4 has five kernels, and runs twice in each layer.

For queries and for keys of each layer, transformers multiplies twice, negates, concatenates and
adds, each in a kernel of its own.  These are 250 kernels and 200 views for each token of E2B, and
the GPU waits for the CPU that launches them.

The fix does the same in one kernel if no gradients are needed, with the same bits.  See
``runtime/kernels/rotary.py``.
"""

from __future__ import annotations

from ...engine import Kind, Patch
from ._rotary import mend

PATCH = Patch(
    name="rotary_kernels",
    kind=Kind.SPEED,
    symptom="generate is slow on a GPU: rotary embeddings of E2B launch 250 kernels for a token",
    affects=("transformers>=5.11",),
    changes=(
        "On a GPU and without gradients, rotary embeddings of Gemma 4 run in one kernel, which "
        "was compared with those of transformers."
    ),
    note=(
        "Releases before 5.11 keep a reference to the function itself, for kernels of the Hub, so "
        "it is not replaced there."
    ),
    unreported="The code is right as it is.",
)

mend(PATCH, "transformers.models.gemma4.modeling_gemma4")
