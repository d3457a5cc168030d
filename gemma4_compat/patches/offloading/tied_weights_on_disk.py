"""A tied weight on the disk is taken for another weight, or is not found.

Before its dispatch, it is on meta.  accelerate tells tied weights by their address, which is 0 for
every tensor on meta.  So before accelerate 1.15 all offloaded weights count as tied to each other,
and the first that a forward loads stands in for the others, silently where its shape fits.  In all
releases, a checkpoint has a tied weight under one of its names only, and the hook of the module
with the other name looks for its own.

The fix forgets the address 0, and gives that hook the stored weight, or that of the other module.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...model.hooks import offload_hook
from ...runtime.host.onloading import offloaded_alone
from ._dispatched import after_dispatch

PATCH = Patch(
    name="tied_weights_on_disk",
    symptom=(
        "KeyError: 'lm_head.weight' in a forward with lm_head on the disk; before accelerate 1.15, "
        "errors about shapes with device_map=\"auto\" and max_memory={'cpu': ...}"
    ),
    affects=("transformers", "accelerate"),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def hook_looks_for_its_own_name() -> Finding:
    """Dispatch a tied module whose weight is stored under the other name."""
    import torch
    from accelerate.hooks import attach_align_device_hook_on_blocks

    model = torch.nn.Module()
    model.head = torch.nn.Linear(1, 1, bias=False, device="meta")
    vars(model)["all_tied_weights_keys"] = {"head.weight": "table.weight"}
    attach_align_device_hook_on_blocks(
        model, {"": "cpu"}, {"": True}, {"table.weight": torch.zeros((1, 1))}
    )
    hook: Any = offload_hook(model.head)
    found = hook.weights_map.get("weight")
    return fixed_if(found is not None, "accelerate finds a tied weight under its other name")


@PATCH.around("accelerate.hooks", "AlignDevicesHook.init_hook", when="accelerate<1.15")
def init_hook(original: Any, self: Any, module: Any) -> Any:
    if self.tied_params_map:
        self.tied_params_map.pop(0, None)
    return original(self, module)


def _find_under_other_name(root: Any) -> None:
    for name, other in (vars(root).get("all_tied_weights_keys") or {}).items():
        module = offloaded_alone(root, name)
        hook = offload_hook(module or root)
        loader = getattr(getattr(hook, "weights_map", None), "dataset", None)
        if module is None or hook is None or loader is None or name in set(loader):
            continue
        weight = root.get_parameter(other)
        if other in set(loader):
            hook.weights_map = type(hook.weights_map)(loader, other.removesuffix("weight"))
        elif not weight.is_meta:
            hook.weights_map = {"weight": weight.detach()}
        if weight.is_meta:  # its placeholder has the dtype
            module.weight = weight


after_dispatch(PATCH, _find_under_other_name)
