"""Trainer does not restore weights that have other names in the checkpoint than in the model.

transformers renames the image embedder of 12B, and a text model of Gemma 3n loaded from the whole
model.  ``save_pretrained`` undoes that, but ``Trainer`` passes the names of the file to
``load_state_dict(state_dict, False)``: these weights stay as they were, with a warning only.  The
fix renames as ``from_pretrained`` does, in a hook of ``load_state_dict`` while Trainer loads.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...model.parts import is_ours
from ...objects import shadowed
from .._code import code_at, mentions

PATCH = Patch(
    name="renamed_checkpoint_weights",
    symptom=(
        "resume_from_checkpoint or load_best_model_at_end of 12B: There were missing keys in the "
        "checkpoint model loaded; the image embedder keeps the weights that it had before"
    ),
    affects=("transformers",),
    changes="Trainer renames the weights of checkpoints of Gemma 4 and 3n as from_pretrained does.",
    links=("https://github.com/huggingface/transformers/issues/48805",),
)

_LOADERS = ("Trainer._load_from_checkpoint", "Trainer._load_best_model")


@PATCH.probe
def names_of_the_file_are_loaded() -> Finding:
    """Check whether both methods call load_state_dict and mention no conversion."""
    codes = [code_at("transformers.trainer", loader) for loader in _LOADERS]
    raw = all("load_state_dict" in code.co_names and not mentions(code, "conver") for code in codes)
    return fixed_if(not raw, "Trainer converts the weights of a checkpoint")


@PATCH.around("transformers.trainer", _LOADERS[0])
@PATCH.around("transformers.trainer", _LOADERS[1])
def load(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from accelerate.utils import extract_model_from_parallel
    from transformers import PreTrainedModel, conversion_mapping, core_model_loading

    given = [each for each in (*args[1:], kwargs.get("model"), self.model) if each is not None][0]
    model = extract_model_from_parallel(given, keep_torch_compile=False)
    known = isinstance(model, PreTrainedModel) and any(is_ours(each) for each in model.modules())
    if not known or self.is_fsdp_enabled or self.is_deepspeed_enabled:
        return original(self, *args, **kwargs)
    used = getattr(model, "_weight_conversions", None) or []  # those of a key_mapping, too
    own, warn, renamed = model.state_dict(), self._issue_warnings_after_load, {}
    start = next(f"{path}." if path else "" for path, x in given.named_modules() if x is model)

    def name_of(key: str) -> str:
        """The weight's name in the model, as ``from_pretrained`` finds it."""
        for mapping in (used, conversion_mapping.get_model_conversion_mapping(model)):
            each = [x for x in mapping if isinstance(x, core_model_loading.WeightRenaming)]
            name = core_model_loading.rename_source_key(key, each, [], model.base_model_prefix, own)
            if name[0] in own:
                return f"{start}{name[0]}"
        return f"{start}{key}" if key in own else key

    def rename(_: Any, state_dict: Any, *args: Any) -> None:
        names = {key: name_of(key) for key in state_dict}
        renamed.update({key: name for key, name in names.items() if key != name})
        tensors = [(names[key], state_dict.pop(key)) for key in list(state_dict)]
        state_dict.update(tensors)

    def warn_of_others(result: Any) -> None:
        missing = [key for key in result.missing_keys if key not in renamed.values()]
        others = [key for key in result.unexpected_keys if key not in renamed]
        warn(result._replace(missing_keys=missing, unexpected_keys=others))

    with ExitStack() as stack:
        hook = given.register_load_state_dict_pre_hook(rename)
        stack.callback(hook.remove)
        stack.enter_context(shadowed(self, _issue_warnings_after_load=warn_of_others))
        return original(self, *args, **kwargs)
