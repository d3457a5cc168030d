"""An offloaded embedding copies its whole weight to the GPU to look up a few rows.

accelerate's offload hook copies the weight of a module to the execution device for each forward
and drops it afterwards.  For Gemma 4's per-layer embeddings (E2B 4.4 GiB, E4B 5.3 GiB in bfloat16)
each token copies the whole table, which needs that much VRAM meanwhile.  A table on the disk is
read into memory first.

The fix leaves the table where it is stored.  For its forward, the embedding gets a weight that
reports the execution device, and only the rows that are looked up are copied.  A table in host
memory is page-locked at the first lookup, and the GPU reads its rows in place, so that no token id
goes back to the CPU.  For a table on the disk, or in memory that cannot be page-locked, the CPU
gathers the rows.  The module computes on the rows (Gemma 4 scales them) on the same device as
before.

Any other use of the weight gets the whole tensor, as before.  So do loads outside a forward, and
embeddings whose weight is on the execution device anyway because they are tied to the head.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Kind, Patch, broken, fixed
from ...runtime.host.page_locked import in_place_of
from ...runtime.host.table import (
    PutBack,
    host_table,
    lookups_of,
    table_to_look_up,
    without_weight,
)

PATCH = Patch(
    name="host_embedding",
    kind=Kind.SPEED,
    symptom=(
        "per-layer embeddings on the CPU or disk cost a copy of the whole table, and its VRAM, in "
        "every forward"
    ),
    affects=("transformers", "accelerate"),
    changes=(
        "AlignDevicesHook copies only the rows that an offloaded nn.Embedding looks up to its "
        "execution device, not the whole weight.  From the disk it reads only those rows."
    ),
    links=("https://github.com/huggingface/transformers/issues/47705",),
)


@PATCH.probe
def whole_weight_is_loaded() -> Finding:
    """Look whether a hook onloads the whole of a tiny table."""
    import torch
    from accelerate.hooks import AlignDevicesHook

    embedding = torch.nn.Embedding(2, 2)
    hook = AlignDevicesHook(execution_device="cpu", offload=True)
    hook.init_hook(embedding)
    hook.pre_forward(embedding, torch.zeros(1, dtype=torch.long))
    return fixed("hooks no longer onload embeddings") if embedding.weight.is_meta else broken()


@PATCH.around("accelerate.hooks", "AlignDevicesHook.init_hook")
def align_devices_hook_init_hook(original: Any, self: Any, module: Any) -> Any:
    """accelerate does not call ``post_forward`` if the forward raises; a forward hook runs."""
    import torch

    module = original(self, module)
    if self.offload and isinstance(module, torch.nn.Embedding):
        host_table()  # two threads that call it first at the same time would make two classes
        if not any(isinstance(hook, PutBack) for hook in module._forward_hooks.values()):
            module.register_forward_hook(PutBack(), always_call=True)
    return module


@PATCH.around("accelerate.hooks", "AlignDevicesHook.pre_forward")
def align_devices_hook_pre_forward(
    original: Any, self: Any, module: Any, *args: Any, **kwargs: Any
) -> Any:
    import torch

    if not (self.offload and isinstance(module, torch.nn.Embedding)):
        return original(self, module, *args, **kwargs)
    lookups = lookups_of(self)
    lookups.leave(module)
    table = table_to_look_up(self, module) if args or kwargs else None
    if table is None:
        return original(self, module, *args, **kwargs)
    result = original(self, without_weight(module), *args, **kwargs)
    lookups.enter(module, table, self.execution_device, in_place_of(self))
    return result


@PATCH.around("accelerate.hooks", "AlignDevicesHook.post_forward")
def align_devices_hook_post_forward(original: Any, self: Any, module: Any, output: Any) -> Any:
    import torch

    if self.offload and isinstance(module, torch.nn.Embedding):
        if lookups_of(self).leave(module):
            module = without_weight(module)
    return original(self, module, output)
