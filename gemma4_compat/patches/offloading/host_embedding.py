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

Any other function of PyTorch gets the whole tensor, as before.  So do loads outside a forward, the
forward of a user's subclass, and embeddings whose weight is on the execution device anyway because
they are tied to the head.
"""

from __future__ import annotations

from inspect import unwrap

from ...engine import Finding, Kind, Patch, broken, fixed
from ...runtime.host.table import Rows
from ._dispatched import use

PATCH = Patch(
    name="host_embedding",
    kind=Kind.MEMORY,
    symptom=(
        "per-layer embeddings on the CPU or disk cost a copy of the whole table, and its VRAM, in "
        "every forward"
    ),
    affects=("transformers", "accelerate"),
    links=("https://github.com/huggingface/transformers/issues/47705",),
)


@PATCH.probe
def whole_weight_is_loaded() -> Finding:
    """Check whether a hook onloads the whole of a tiny table."""
    import torch
    from accelerate.hooks import AlignDevicesHook

    embedding = torch.nn.Embedding(2, 2)
    hook = AlignDevicesHook(execution_device="cpu", offload=True)
    hook.init_hook(embedding)
    # Its wrapper imports torch._dynamo, which takes seconds.
    unwrap(AlignDevicesHook.pre_forward)(hook, embedding, torch.zeros(1, dtype=torch.long))
    return fixed("hooks no longer onload embeddings") if embedding.weight.is_meta else broken()


use(PATCH, Rows())
