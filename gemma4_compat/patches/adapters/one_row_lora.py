"""A LoRA adapter on a 4-bit model adds eight kernels to each layer of a decode step.

PEFT casts the inputs to float32, multiplies with A and with B, multiplies by the scaling, casts
back, copies the result of the base layer and adds.  For E2B, these are 1,640 kernels a token, and
the GPU takes longer to start each than to compute it.

In a forward of our text models with at most 8 tokens, the fix uses one or two kernels of its own,
see ``runtime/kernels/one_row_lora.py``.  They are the same in eager and captured steps.  Their
outputs are not those of PEFT bit for bit: they are closer to the exact sum, because they round only
once.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_at
from ...runtime.capture.decoding import forget
from ...runtime.host.onloading import onloaded
from ...runtime.kernels.one_row_lora import in_kernels

PATCH = Patch(
    name="one_row_lora",
    kind=Kind.FAST,
    symptom=(
        "decoding with a LoRA adapter on a 4-bit model is slow: PEFT launches eight kernels for "
        "each adapted layer and token"
    ),
    affects=("transformers", "peft", "bitsandbytes"),
    unreported="PEFT's operators are right, and made for more than one row.",
    requires=("one_row_4bit",),
)

_MODULE = "peft.tuners.lora.bnb"
PATCH.copies(_MODULE, "Linear4bit.forward", "e7eb1e0674b1")


@PATCH.probe
def peft_multiplies_and_adds() -> Finding:
    names = code_at(_MODULE, "Linear4bit.forward").co_names
    return fixed_if("lora_A" not in names, "Linear4bit.forward adds the update in another way")


@PATCH.replaces(_MODULE, "Linear4bit.forward")
def forward(original: Any) -> Any:
    return in_kernels(original, onloaded)


PATCH.on_revert(forget)
