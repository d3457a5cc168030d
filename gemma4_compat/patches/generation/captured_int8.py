"""The decode steps of 8-bit models with an outlier threshold cannot be captured.

LLM.int8() multiplies the inputs whose absolute value reaches the threshold, the outliers, in the
inputs' own dtype.  bitsandbytes selects their columns, and the CPU has to know how many these are.
A captured step (see ``captured_decoding``) cannot wait for the CPU.

In the thread of such a step, and in the eager step before the capture, the fix searches on the GPU,
see ``runtime/kernels/int8_outliers.py``.
"""

from __future__ import annotations

from ...engine import Finding, Kind, Patch, broken, drifted, fixed
from ...runtime.capture.decoding import forget
from ...runtime.kernels.int8_outliers import matmul
from .._code import code_at, mentions

PATCH = Patch(
    name="captured_int8",
    kind=Kind.FAST,
    symptom=(
        "decodes eagerly with a static cache, because its 8-bit layers search their inputs for "
        "outliers"
    ),
    affects=("transformers", "bitsandbytes"),
    changes=(
        "bitsandbytes.matmul searches for outliers on the GPU in the decode steps that "
        "captured_decoding captures, and nowhere else."
    ),
    requires=("captured_decoding",),
    unreported="The search is part of LLM.int8(); transformers captures no steps.",
)


@PATCH.probe
def the_search_waits_for_the_cpu() -> Finding:
    """Check that 8-bit layers call ``bitsandbytes.matmul``, which selects columns."""
    if "matmul" not in code_at("bitsandbytes.nn.modules", "Linear8bitLt.forward").co_names:
        return drifted("Linear8bitLt.forward does not call bitsandbytes.matmul")
    code = code_at("bitsandbytes.autograd._functions", "MatMul8bitLt.forward")
    return broken() if mentions(code, "outlier_cols") else fixed("no columns are selected")


PATCH.on_revert(forget)
PATCH.around("bitsandbytes", "matmul")(matmul)
