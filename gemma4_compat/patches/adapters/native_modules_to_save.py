"""transformers' own ``load_adapter`` drops ``modules_to_save`` and trained tokens.

An adapter file names the tensors of a module in ``modules_to_save`` like those of the module
itself.  In the model they belong to a copy, ``...norm.modules_to_save.default.weight``.  PEFT gets
the new names from the wrapper around the copy, but ``PeftAdapterMixin.load_adapter`` does not
before transformers 5.18.  The copy keeps the values of the original.  No exception is raised.

The fix renames the tensors as PEFT does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ._native_names import LOAD_ADAPTER, loading_in, loading_with

PATCH = Patch(
    name="native_modules_to_save",
    symptom=(
        "model.load_adapter leaves the modules in modules_to_save, and trainable tokens, at the "
        "base model's values, without an error"
    ),
    affects=("transformers<5.18", "peft"),
    links=("https://github.com/huggingface/transformers/pull/48595",),
)


@PATCH.probe
def names_are_not_translated() -> Finding:
    """Check whether load_adapter gets the names of the tensors from PEFT's wrappers."""
    code = code_at("transformers.integrations.peft", "PeftAdapterMixin.load_adapter")
    renames = mentions(code, "adapter_state_dict_load_map")
    return fixed_if(renames, "load_adapter renames the tensors of modules_to_save")


@PATCH.around(*LOAD_ADAPTER)
@loading_in
def load_adapter(model: Any, adapter_name: str) -> Any:
    return loading_with(model, lambda: _renamed(model, adapter_name))


def _renamed(model: Any, adapter_name: str) -> Iterator[Any]:
    from peft.utils.other import AuxiliaryTrainingWrapper
    from transformers.core_model_loading import WeightRenaming

    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            for saved, loaded in module.adapter_state_dict_load_map(adapter_name).items():
                yield WeightRenaming(re.escape(f"{name}.{saved}"), f"{name}.{loaded}")
