"""After PEFT merges or unloads an adapter, transformers still expects adapters in the model.

``model.load_adapter`` and ``model.add_adapter`` of transformers set a flag on the model,
``_hf_peft_config_loaded``.  PEFT does not know this flag.  Its ``merge_and_unload`` and ``unload``
remove every adapter layer from the model, also those that transformers made, but not the flag.
``save_pretrained`` then looks for adapters to save instead of the model, and there are none.

The fix resets the flag once PEFT has removed the last adapter layer.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._code import mentions

PATCH = Patch(
    name="merged_adapter_flag",
    symptom=(
        "load_adapter or add_adapter, then PEFT's merge_and_unload and save_pretrained: "
        "UnboundLocalError: cannot access local variable 'active_adapters'"
    ),
    affects=("transformers", "peft"),
    changes=(
        "PEFT's merge_and_unload and unload reset transformers' flag for a model with adapters "
        "when they remove the last adapter layer."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)

_FLAG = "_hf_peft_config_loaded"


@PATCH.probe
def flag_is_not_known() -> Finding:
    """Look whether the replaced methods unload adapters, and whether they use the flag."""
    import inspect

    from peft.tuners.tuners_utils import BaseTuner

    for name in ("merge_and_unload", "unload"):
        code = getattr(inspect.unwrap(getattr(BaseTuner, name)), "__code__", None)
        if code is None or not mentions(code, "_unload_and_optionally_merge"):
            return drifted(f"BaseTuner.{name} does not call _unload_and_optionally_merge")
        if mentions(code, _FLAG):
            return fixed(f"BaseTuner.{name} resets the flag of transformers itself")
    return broken()


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.merge_and_unload")
@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.unload")
def unload(original: Any) -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer

    @wraps(original)
    def unload(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(self, *args, **kwargs)
        own = vars(model)
        if own.get(_FLAG) and not any(isinstance(m, BaseTunerLayer) for m in model.modules()):
            own[_FLAG] = False
            own.pop("peft_config", None)
        return model

    return unload
