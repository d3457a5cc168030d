"""After ``load_adapter``, a model is saved with the names of an adapter file.

transformers stores on the model, in ``_weight_conversions``, how it converted the checkpoint while
loading.  ``save_pretrained`` undoes these conversions.  ``model.load_adapter`` reads the adapter
with the same function, which replaces the model's conversions by those of the adapter.  As long as
the model has adapters, users do not notice, because only the adapters are saved.  Once they are
merged or deleted, ``save_pretrained`` gives the model's own weights the names of an adapter file.
``from_pretrained`` of that folder finds no weights, and leaves them random.

The fix keeps the conversions of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_of
from ._native_names import LOAD_ADAPTER, loading_in

PATCH = Patch(
    name="native_adapter_conversions",
    symptom=(
        "load_adapter, then merge_and_unload or delete_adapter, and save_pretrained: the file has "
        "other names, and loads as a model with random weights, without an error"
    ),
    affects=("transformers", "peft"),
    unreported="Found by the tests of this package; no report is known upstream.",
)

_CONVERSIONS = "_weight_conversions"


@PATCH.probe
def conversions_are_kept_on_the_model() -> Finding:
    """Check whether loading stores the conversions on the model, and load_adapter keeps them."""
    from transformers import core_model_loading

    code = code_of(core_model_loading.convert_and_load_state_dict_in_model)
    return fixed_if(_CONVERSIONS not in code.co_names, f"loading no longer sets {_CONVERSIONS}")


@PATCH.around(*LOAD_ADAPTER)
@loading_in
@contextmanager
def load_adapter(model: Any, adapter_name: str) -> Iterator[None]:
    own = vars(model)
    before = {_CONVERSIONS: own[_CONVERSIONS]} if _CONVERSIONS in own else {}
    try:
        yield
    finally:
        own.pop(_CONVERSIONS, None)
        own.update(before)
