"""accelerate cannot take its hooks off a split model inside PEFT's wrappers.

``remove_hook_from_module`` asks each module whether it has a hook.  ``PeftModel``, the tuner in it
and the wrappers of ``modules_to_save`` answer with the attributes of the module that they wrap.
accelerate then takes the wrapped module's hook for the wrapper's own, and cannot delete it there.

The fix overlooks attributes that a module does not have itself.  The wrapped module has its turn
after its wrapper.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, fixed

PATCH = Patch(
    name="hook_removal",
    symptom=(
        "AttributeError: 'PeftModel' object has no attribute '_hf_hook' from "
        "remove_hook_from_submodules or remove_hook_from_module(recurse=True)"
    ),
    affects=("accelerate", "peft"),
    changes=(
        "remove_hook_from_module leaves modules alone that pass the hook of another module for "
        "their own."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def hook_of_a_wrapped_module() -> Finding:
    """Take the hooks off a module inside a wrapper that passes attributes on."""
    import torch
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Wrapper(torch.nn.Module):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self._modules["inner"], name)

    wrapper = Wrapper()
    wrapper.inner = add_hook_to_module(torch.nn.Identity(), ModelHook())
    try:
        remove_hook_from_module(wrapper, recurse=True)
    except AttributeError:
        return broken()
    return fixed("remove_hook_from_module takes the hooks of wrapped modules off")


@PATCH.replaces("accelerate.hooks", "remove_hook_from_module")
def remove_hook_from_module(original: Any) -> Any:
    from accelerate import hooks

    @wraps(original)
    def remove_hook_from_module(module: Any, recurse: bool = False) -> Any:
        if not _passes_a_hook_on(module):
            return original(module, recurse)
        if recurse:
            for child in module.children():
                hooks.remove_hook_from_module(child, recurse)
        return module

    return remove_hook_from_module


def _passes_a_hook_on(module: Any) -> bool:
    """Whether a hook can be read of a module and not deleted."""
    import torch

    if type(module).__delattr__ is not torch.nn.Module.__delattr__:
        return False  # torch.compile's wrapper deletes attributes of the module inside
    names = ("_hf_hook", "_old_forward")
    return any(name not in vars(module) and hasattr(module, name) for name in names)
