"""Loading an adapter that was trained on another model fails, and the error does not say why.

``load_state_dict`` raises a line for each tensor: ``size mismatch for ...``.  A user of E4B who
takes an adapter for E2B reads hundreds of them.

The patch leaves the error as it is, and adds a line with the cause and with the command that
compares an adapter and a model.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from ...engine import Finding, Kind, Patch, broken, fixed
from ...model.parts import MODELS
from .._advice import advise
from .._code import mentions

PATCH = Patch(
    name="adapter_error_advice",
    kind=Kind.WARNING,
    symptom="RuntimeError: size mismatch for ...lora_A.default.weight: the adapter does not fit",
    affects=("peft", "transformers"),
    changes=(
        "If an adapter does not fit a Gemma 4 or Gemma 3n model, the error of "
        "PeftModel.load_adapter ends with a line that says so, and what to do."
    ),
    unreported="The error is right.  It only lacks advice.",
)


@PATCH.probe
def errors_have_no_advice() -> Finding:
    """Look whether load_adapter adds notes to errors itself."""
    from peft.peft_model import PeftModel

    if mentions(inspect.unwrap(PeftModel.load_adapter).__code__, "add_note"):
        return fixed("load_adapter gives advice")
    return broken()


@PATCH.replaces("peft.peft_model", "PeftModel.load_adapter")
def load_adapter(original: Any) -> Any:
    """``PeftModel.from_pretrained`` calls it, too."""

    @wraps(original)
    def load_adapter(self: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, model_id, *args, **kwargs)
        except RuntimeError as error:
            if "size mismatch" in str(error) and _is_gemma(self):
                advise(
                    error,
                    "the adapter was trained on another model; load it on that one.  To compare, "
                    f"run gemma4-compat adapter {model_id} --model MODEL",
                )
            raise

    return load_adapter


def _is_gemma(model: Any) -> bool:
    return type(model.get_base_model()).__module__.startswith(MODELS)
