"""Some PEFT methods look for their targets on their own.

Most methods share one piece of code that matches modules with ``target_modules``.  EVA and LoRA-GA
match once more, before or after, to initialise an adapter from data, and Lily decides by the names
in ``target_modules`` which layers share their matrices.  All three take the name of a
``...ClippableLinear`` wrapper for that of a layer that is not theirs.

The fix lets their look-ups, too, see the linear layer inside where a target names the wrapper.  It
is a patch of its own so that a change to one of these methods costs nothing but that method.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from .._clippable import matching_inner, resolving, wrappers
from .._shadow import shadowed

PATCH = Patch(
    name="clippable_linear_lookups",
    symptom=(
        "EVA and LoRA-GA leave out the layers inside Gemma4ClippableLinear, or Lily does not "
        "share matrices between them, when targets name the wrapper"
    ),
    affects=("transformers", "peft"),
    changes=(
        "get_eva_state_dict, preprocess_loraga and Lily's sharing of matrices resolve the names "
        "of ...ClippableLinear wrappers to the layers inside."
    ),
    note="It ends with the bug of clippable_linear.",
    requires=("clippable_linear",),
    links=("https://github.com/huggingface/peft/issues/3129",),
)


@PATCH.probe
def lookup_is_by_name() -> Finding:
    """Look whether EVA still matches names of modules with the targets itself."""
    from peft.tuners.lora import eva

    if hasattr(eva, "check_target_module_exists"):
        return broken()
    return fixed("EVA no longer looks for targets on its own")


PATCH.replaces("peft.tuners.tuners_utils", "check_target_module_exists")(matching_inner)


@PATCH.replaces("peft.tuners.lora.eva", "get_eva_state_dict")
def get_eva_state_dict(original: Any) -> Any:
    @wraps(original)
    def get_eva_state_dict(model: Any, *args: Any, **kwargs: Any) -> Any:
        with resolving(model):
            return original(model, *args, **kwargs)

    return get_eva_state_dict


@PATCH.replaces("peft.tuners.lora.loraga", "preprocess_loraga", when="peft>=0.19")
def preprocess_loraga(original: Any) -> Any:
    @wraps(original)
    def preprocess_loraga(model: Any, *args: Any, **kwargs: Any) -> Any:
        with resolving(model):
            return original(model, *args, **kwargs)

    return preprocess_loraga


@PATCH.replaces("peft.tuners.lily.model", "LilyModel._post_injection_hook", when="peft>=0.19")
def lily_sharing(original: Any) -> Any:
    @wraps(original)
    def _post_injection_hook(self: Any, model: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        targets = config.target_modules
        if isinstance(targets, str) or not wrappers(model):
            return original(self, model, config, *args, **kwargs)
        # Lily shares matrices between layers whose names end in the same target.
        names = {*targets, *(f"{target}.linear" for target in targets)}
        with shadowed(config, target_modules=names):
            return original(self, model, config, *args, **kwargs)

    return _post_injection_hook
