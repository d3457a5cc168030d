"""After ``load_adapter`` a model is saved under the names of an adapter.

transformers keeps on the model how it converted the checkpoint on loading, in
``_weight_conversions``, and ``save_pretrained`` undoes that.  ``model.load_adapter`` reads the
adapter by the same function, which replaces the conversions of the model by those of the adapter.
While the model has adapters, nothing shows: then only these are saved.  Once they are merged or
deleted, ``save_pretrained`` gives the model's own weights the names of an adapter file.
``from_pretrained`` of that folder finds no weights, and leaves random ones.

The fix keeps the conversions of the model.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, fixed

PATCH = Patch(
    name="native_adapter_conversions",
    symptom=(
        "load_adapter, then merge_and_unload or delete_adapter, and save_pretrained: the file has "
        "other names, and loads as a model with random weights, without a word"
    ),
    affects=("transformers", "peft"),
    changes="transformers' load_adapter leaves the model the conversions of its own checkpoint.",
    unreported="Found by the tests of this package; no report is known upstream.",
)

_CONVERSIONS = "_weight_conversions"


@PATCH.probe
def conversions_are_kept_on_the_model() -> Finding:
    """Look whether the conversions are kept where they are expected; they cannot be tried here."""
    import inspect

    from transformers import core_model_loading

    code = inspect.unwrap(core_model_loading.convert_and_load_state_dict_in_model).__code__
    if _CONVERSIONS not in code.co_names:
        return fixed(f"loading no longer sets {_CONVERSIONS}")
    return broken()


@PATCH.replaces("transformers.integrations.peft", "PeftAdapterMixin.load_adapter")
def load_adapter(original: Any) -> Any:
    @wraps(original)
    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)
        before = {_CONVERSIONS: own[_CONVERSIONS]} if _CONVERSIONS in own else {}
        try:
            return original(self, *args, **kwargs)
        finally:
            own.pop(_CONVERSIONS, None)
            own.update(before)

    return load_adapter
