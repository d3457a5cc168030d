"""4-bit models multiply slowly with the row of inputs that one token has, or with a few rows.

Each layer in 4 bits has one product in a step of one token.  bitsandbytes' kernel for one row takes
about 9 us for the small layers of E2B, whose bytes the memory sends in one.  Before 0.50, double
quantization adds two kernels for the maxima of the blocks.  This is most of the time of a captured
step.  With the rows of several tokens, as in a check of drafts, they take longer.

In forwards of the text model with at most 8 tokens, the fix uses a kernel of its own, see
``runtime/kernels/one_row_4bit.py``.  It is the same in eager and captured steps.  Its outputs are
not those of bitsandbytes bit for bit: they are closer to the exact product, because it rounds only
once.
"""

from __future__ import annotations

from ...engine import Finding, Kind, Patch, drifted, fixed_if
from ...engine.probing import code_at, mentions
from ...runtime.capture.decoding import forget
from ...runtime.kernels.one_row_4bit import in_forward, matmul
from .._families import FAMILIES, former

PATCH = Patch(
    name="one_row_4bit",
    kind=Kind.FAST,
    symptom="half of the time of a decode step goes into the 4-bit products of one token",
    affects=("bitsandbytes",),
    unreported="bitsandbytes' kernels are right, and not made for layers this small.",
    former=former("one_row_4bit"),
)


@PATCH.probe
def one_row_has_a_kernel_of_bitsandbytes() -> Finding:
    """Check that 4-bit layers call ``bitsandbytes.matmul_4bit``, and that it has a kernel."""
    if "matmul_4bit" not in code_at("bitsandbytes.nn.modules", "Linear4bit.forward").co_names:
        return drifted("Linear4bit.forward does not call bitsandbytes.matmul_4bit")
    code = code_at("bitsandbytes.autograd._functions", "matmul_4bit")
    has_kernel = mentions(code, "gemv_4bit") or mentions(code, "gemm_4bit")
    return fixed_if(not has_kernel, "matmul_4bit multiplies in another way")


for family in FAMILIES:
    part = PATCH.part(family.name, family.requirement)
    part.around(family.module, f"{family.prefix}TextModel.forward")(in_forward)
PATCH.around("bitsandbytes", "matmul_4bit")(matmul)
PATCH.on_revert(forget)
