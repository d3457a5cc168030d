"""accelerate cannot remove its hooks from a split model inside PEFT's wrappers.

``remove_hook_from_module`` checks whether each module has a hook.  ``PeftModel``, its tuner and the
wrappers of ``modules_to_save`` return the attributes of the module that they wrap.  accelerate then
treats the wrapped module's hook as the wrapper's own, and cannot delete it from the wrapper.

The fix ignores hooks that a module does not have itself.  The wrapped module is visited after its
wrapper.
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
    affects=("transformers", "accelerate", "peft"),
    changes=(
        "remove_hook_from_module skips modules that return the hook of another module as their own."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def hook_of_a_wrapped_module() -> Finding:
    """Remove the hook of a module inside a wrapper that returns the module's attributes."""
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
    return fixed("remove_hook_from_module removes the hooks of wrapped modules")


@PATCH.replaces("accelerate.hooks", "remove_hook_from_module")
def remove_hook_from_module(original: Any) -> Any:
    from accelerate import hooks

    @wraps(original)
    def remove_hook_from_module(module: Any, recurse: bool = False) -> Any:
        if not _returns_foreign_hook(module):
            return original(module, recurse)
        if recurse:
            for child in module.children():
                hooks.remove_hook_from_module(child, recurse)
        return module

    return remove_hook_from_module


def _returns_foreign_hook(module: Any) -> bool:
    """Whether the hook that a module returns belongs to another module."""
    import torch

    if type(module).__delattr__ is not torch.nn.Module.__delattr__:
        return False  # torch.compile's wrapper deletes the attributes of the wrapped module
    names = ("_hf_hook", "_old_forward")
    return any(name not in vars(module) and hasattr(module, name) for name in names)
