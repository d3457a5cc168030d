"""A 4-bit layer on the CPU misreads inputs that are not contiguous.

On a CPU with AVX512-BF16, ``Linear4bit.forward`` calls a kernel that uses the stride between the
rows of its input, but expects the values of a row to be contiguous.  After a ``transpose`` they are
not: the kernel reads other values, and the outputs are wrong without an error.  Gemma 4's audio
tower does this in every layer, between its convolution and ``lconv1d.linear_end``.

The fix makes such inputs contiguous.  It changes nothing if upstream already does so.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if

PATCH = Patch(
    name="cpu_strided_input",
    symptom=(
        "a 4-bit audio tower that runs on an AVX512-BF16 CPU gives wrong outputs, without an error"
    ),
    affects=("transformers", "bitsandbytes>=0.49"),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1995",),
)


@PATCH.probe
def cpu_has_the_kernel() -> Finding:
    """Check the CPU's instructions; running the kernel would start threads during an import."""
    from bitsandbytes.functional import has_avx512bf16

    unused = not has_avx512bf16()
    return fixed_if(unused, "bitsandbytes does not use the AVX512-BF16 kernel on this CPU")


@PATCH.around("bitsandbytes.functional", "gemv_4bit")
def gemv_4bit(original: Any, A: Any, *args: Any, **kwargs: Any) -> Any:
    return original(A.contiguous() if A.device.type == "cpu" else A, *args, **kwargs)
