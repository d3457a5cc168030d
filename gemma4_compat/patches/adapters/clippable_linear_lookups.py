"""Some PEFT methods search their targets with code of their own.

Most methods share the code that matches modules with ``target_modules``.  EVA and LoRA-GA match
again, before or after, to initialise an adapter from data.  Lily uses the names in
``target_modules`` to decide which layers share matrices.  All three miss the layers inside
``...ClippableLinear`` wrappers if ``target_modules`` names the wrappers.

The fix resolves the name of a wrapper to the linear layer inside in these searches, too.  It is a
separate patch, so that an upstream change to one of these methods disables only this patch.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...objects import shadowed
from ._clippable import matching_inner, resolving, wrappers

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
    """Check whether EVA matches module names with the targets itself."""
    from peft.tuners.lora import eva

    matches = hasattr(eva, "check_target_module_exists")
    return fixed_if(not matches, "EVA no longer matches targets itself")


PATCH.around("peft.tuners.tuners_utils", "check_target_module_exists")(matching_inner)


@PATCH.around("peft.tuners.lora.eva", "get_eva_state_dict")
@PATCH.around("peft.tuners.lora.loraga", "preprocess_loraga", when="peft>=0.19")
def initialise(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    with resolving(model):
        return original(model, *args, **kwargs)


@PATCH.around("peft.tuners.lily.model", "LilyModel._post_injection_hook", when="peft>=0.19")
def lily_sharing(
    original: Any, self: Any, model: Any, config: Any, *args: Any, **kwargs: Any
) -> Any:
    targets = config.target_modules
    if isinstance(targets, str) or not wrappers(model):
        return original(self, model, config, *args, **kwargs)
    # Lily shares matrices between layers whose names end in the same target.
    names = {*targets, *(f"{target}.linear" for target in targets)}
    with shadowed(config, target_modules=names):
        return original(self, model, config, *args, **kwargs)
