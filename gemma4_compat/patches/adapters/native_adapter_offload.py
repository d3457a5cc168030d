"""transformers' own ``load_adapter`` drops the tensors of offloaded layers.

``PeftAdapterMixin.load_adapter`` loads the adapter file with the base model's ``hf_device_map``.
If a layer is stored on "disk" (or, in some releases, "cpu"), it treats the adapter's tensors like
the layer's own: they stay on disk, or go to meta, and the adapter keeps its initial values or has
none.  No exception is raised.

While the file loads, the fix replaces the map by one of the layers' execution devices.  A weight of
the base model in the file, such as that of the embeddings under LoRA, goes to the layer's hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_of, mentions
from ...model.hooks import offload_hook
from ...runtime.host.onloading import executing_map, has_changed, offload, tied_copies_follow
from ._native_names import LOAD_ADAPTER, loading_in

PATCH = Patch(
    name="native_adapter_offload",
    symptom=(
        "model.load_adapter on a split model: the adapter's tensors on offloaded layers are not "
        "loaded, without an error; they keep their initial values or have none"
    ),
    affects=("transformers", "accelerate", "peft"),
    unreported=("Found by the tests of this package; no report is known upstream."),
)


@PATCH.probe
def load_adapter_reads_device_map() -> Finding:
    """Check whether load_adapter places adapters by the base model's map."""
    from transformers.integrations.peft import PeftAdapterMixin

    reads = mentions(code_of(PeftAdapterMixin.load_adapter), "hf_device_map")
    return fixed_if(not reads, "load_adapter no longer loads by hf_device_map")


@PATCH.around(*LOAD_ADAPTER)
@loading_in
@contextmanager
def load_adapter(model: Any, adapter_name: str) -> Iterator[None]:
    with executing_map(model):
        yield
    loaded = [(module, hook) for module in model.modules() if (hook := _hook_past_by(module))]
    changed = [module for module, hook in loaded if has_changed(module, hook)]
    with tied_copies_follow(model, changed):
        for module, hook in loaded:
            offload(module, hook, keep_changes=module in changed)


def _hook_past_by(module: Any) -> Any | None:
    """The hook of an offloaded module if the module's weight was loaded past the hook."""
    weight = module._parameters.get("weight")
    return None if weight is None or weight.is_meta else offload_hook(module)
