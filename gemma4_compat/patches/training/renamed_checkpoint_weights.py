"""Trainer does not restore weights that have other names in the checkpoint than in the model.

transformers renames the image embedder of 12B, and a text model of Gemma 3n loaded from the whole
model.  ``save_pretrained`` undoes that, but ``Trainer`` passes the names of the file to
``load_state_dict(state_dict, False)``: these weights stay as they were, with a warning only.  The
fix renames as ``from_pretrained`` does, in ``load_state_dict`` while Trainer loads.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...model.parts import is_ours
from ...objects import shadowed
from .._code import code_at, mentions

PATCH = Patch(
    name="renamed_checkpoint_weights",
    symptom="Trainer resumes 12B: There were missing keys in the checkpoint model loaded",
    affects=("transformers",),
    changes="Trainer renames the weights of checkpoints of Gemma 4 and 3n as from_pretrained does.",
    links=("https://github.com/huggingface/transformers/issues/48805",),
)

_MODULE = "transformers.trainer"
_RESUME, _BEST = "Trainer._load_from_checkpoint", "Trainer._load_best_model"


@PATCH.probe
def names_of_the_file_are_loaded() -> Finding:
    codes = [code_at(_MODULE, _RESUME), code_at(_MODULE, _BEST)]
    raw = all("load_state_dict" in code.co_names and not mentions(code, "conver") for code in codes)
    return fixed_if(not raw, "Trainer converts the weights of a checkpoint")


@PATCH.around(_MODULE, _RESUME)
@PATCH.around(_MODULE, _BEST)
def load(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from accelerate.utils import extract_model_from_parallel
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    given = next(x for x in (*args[1:], kwargs.get("model"), self.model) if x is not None)
    model = extract_model_from_parallel(given, keep_torch_compile=False)
    known = isinstance(model, PreTrainedModel) and any(is_ours(each) for each in model.modules())
    if not known or self.is_fsdp_enabled or self.is_deepspeed_enabled:
        return original(self, *args, **kwargs)
    used = getattr(model, "_weight_conversions", None) or []  # those of a key_mapping, too
    every: list[Any] = [used, get_model_conversion_mapping(model), []]
    mappings = [[x for x in each if isinstance(x, WeightRenaming)] for each in every]
    names: dict[str, str] = {}  # in the model, by those in the files
    own = model.state_dict()
    start = next(f"{path}." if path else "" for path, x in given.named_modules() if x is model)

    def renamed(state_dict: Any, *args: Any, load: Any = given.load_state_dict, **kw: Any) -> Any:
        for key, each in product(state_dict, mappings):
            name = rename_source_key(key, each, [], model.base_model_prefix, own)[0]
            if name in own:
                names.setdefault(key, f"{start}{name}")
        return load({names.get(key, key): state_dict[key] for key in state_dict}, *args, **kw)

    def warn(result: Any, issue: Any = self._issue_warnings_after_load) -> None:
        missing = [key for key in result.missing_keys if key not in names.values()]
        others = [key for key in result.unexpected_keys if key not in names]
        issue(result._replace(missing_keys=missing, unexpected_keys=others))

    with shadowed(given, load_state_dict=renamed), shadowed(self, _issue_warnings_after_load=warn):
        return original(self, *args, **kwargs)
