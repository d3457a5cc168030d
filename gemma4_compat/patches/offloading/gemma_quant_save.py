"""``save_pretrained`` of a QAT checkpoint in Google's own format raises.

``PreTrainedModel.save_pretrained`` calls ``hf_quantizer.is_serializable()``.  In every other
quantizer that is a method; in ``GemmaQuantizer`` it is a property, and its value is called.
With the fix, the value can be called.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if

PATCH = Patch(
    name="gemma_quant_save",
    symptom="save_pretrained of a QAT checkpoint (mobile): 'bool' object is not callable",
    affects=("transformers>=5.11",),
    changes="The value of GemmaQuantizer.is_serializable can also be called, and returns itself.",
    unreported="Found by saving a random checkpoint in this format.",
)

_MODULE = "transformers.quantizers.quantizer_gemma"


@PATCH.probe
def is_a_property() -> Finding:
    """Check whether the value of a property is called."""
    from transformers.quantizers.quantizer_gemma import GemmaQuantizer

    is_property = isinstance(vars(GemmaQuantizer).get("is_serializable"), property)
    return fixed_if(not is_property, "GemmaQuantizer.is_serializable is a method")


class _Callable(int):
    """A boolean that returns itself when it is called."""

    def __call__(self) -> bool:
        return bool(self)


@PATCH.around(_MODULE, "GemmaQuantizer.is_serializable")
def is_serializable(original: Any, self: Any) -> Any:
    return _Callable(original(self))
