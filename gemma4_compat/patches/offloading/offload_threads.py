"""Threads that run the same model with offloaded modules disturb each other.

accelerate's hook gives an offloaded module its weights before a forward, and removes them
afterwards.  The weights belong to the module, not to the forward.  The thread that finishes first
removes them while another thread computes.  The other thread fails with a tensor on meta, or
computes with some of the weights missing.  The state that the hook stores between the two steps is
shared in the same way: the device of the inputs, the tied weights to remove and, in this package,
the layers that are being copied to the GPU.

After a forward that raised, the weights of the module stay on the device.  If one of them has the
address that a tied weight had when the model was dispatched, the next forward uses the tied weight
instead, without an error.

The fix uses two locks for each dispatched model with offloaded modules.  A thread holds one while a
module has its weights, and the other, which only saves time, during a forward of the model.
Threads that generate take turns, one forward each.  Models without offloaded modules have no lock.
After an exception, the hooks remove the weights as after any forward.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_of, mentions
from ...model.hooks import offload_hook
from ...runtime.host.forward_lock import lock_forward, share_lock
from ._dispatched import after_dispatch

PATCH = Patch(
    name="offload_threads",
    symptom=(
        "generate in several threads on one model with offloaded modules: Tensor on device meta "
        "is not on the expected device, in some of the calls"
    ),
    affects=("transformers", "accelerate"),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def hooks_take_no_lock() -> Finding:
    """Check whether a forward with a hook takes a lock."""
    from accelerate import hooks

    functions = (hooks.add_hook_to_module, hooks.AlignDevicesHook.pre_forward)
    locks = any(mentions(code_of(function), "lock") for function in functions)
    return fixed_if(locks, "accelerate's hooks take a lock")


@PATCH.around("accelerate.hooks", "add_hook_to_module")
def add_hook_to_module(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    module = original(module, *args, **kwargs)
    if offload_hook(module) is not None:
        lock_forward(module)
    return module


after_dispatch(PATCH, share_lock)
