"""Trainer does not restore weights that have other names in the checkpoint than in the model.

``from_pretrained`` renames the image embedder of 12B, the weights of a Gemma 3n text model from the
whole model, and those of a ``key_mapping``.  ``save_pretrained`` undoes that, but ``Trainer`` gives
the names in the file to ``load_state_dict``, which skips them.  The fix renames them there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ...model.parts import is_ours
from ...objects import shadowed

PATCH = Patch(
    name="renamed_checkpoint_weights",
    symptom="Trainer resumes 12B: There were missing keys in the checkpoint model loaded",
    affects=("transformers",),
    links=("https://github.com/huggingface/transformers/issues/48805",),
)

_MODULE = "transformers.trainer"
_CALLED = {"load_state_dict", "_issue_warnings_after_load"}
_RESUME, _BEST = "Trainer._load_from_checkpoint", "Trainer._load_best_model"


@PATCH.probe
def names_of_the_file_are_loaded() -> Finding:
    codes = [code_at(_MODULE, _RESUME), code_at(_MODULE, _BEST)]
    raw = all({*code.co_names} >= _CALLED and not mentions(code, "conver") for code in codes)
    return fixed_if(not raw, "Trainer loads the weights of a checkpoint in another way")


@PATCH.around(_MODULE, _RESUME)
@PATCH.around(_MODULE, _BEST)
def load(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_ours(model := self.model) or hasattr(model, "peft_config") or self.is_fsdp_enabled:
        return original(self, *args, **kwargs)  # PEFT and FSDP save the names of the model
    known: set[str] = set()  # renamed weights: their names in the files and in the model

    def renamed(state_dict: Any, *args: Any, load: Any = model.load_state_dict, **kw: Any) -> Any:
        names = names_in(model, state_dict)
        known.update(names, names.values())
        return load({names.get(key, key): state_dict[key] for key in state_dict}, *args, **kw)

    def warn(result: Any, issue: Any = self._issue_warnings_after_load) -> None:
        issue(type(result)(*([key for key in keys if key not in known] for keys in result)))

    with shadowed(model, load_state_dict=renamed), shadowed(self, _issue_warnings_after_load=warn):
        return original(self, *args, **kwargs)


def names_in(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """The names in the model of the weights that have other names in the checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    used = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
    renamings = [each for each in used if isinstance(each, WeightRenaming)]
    own = model.state_dict()
    names = {key: rename_source_key(key, renamings, [])[0] for key in keys if key not in own}
    return {key: name for key, name in names.items() if name in own}
