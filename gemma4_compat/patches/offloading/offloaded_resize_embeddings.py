"""Offloaded embeddings cannot be resized, or tied again.

``resize_token_embeddings`` makes a larger or smaller weight, and copies the old rows to it.  The
weight of offloaded embeddings is on meta, so no row is copied, and the new weight is on meta, too.
accelerate's hook still has the old weight, and the next forward fails, because the shapes differ.

``tie_weights``, which a resize calls at its end and users may call at any time, makes the head use
the weight of the embeddings.  If the embeddings are offloaded, the weight of the head is then on
meta, and no hook loads it.

The fix onloads offloaded embeddings, and an offloaded head, while they are resized or tied.  From
then on their hooks load the new weights.

accelerate looks tied weights up by the address that they had when the model was dispatched.  After
a resize, that address is free, and a weight read from the disk may get it.  The fix removes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at
from ...model.hooks import host_tensors, offload_hooks
from ...model.tensors import address
from ...runtime.host.onloading import offload, onload, onloaded

PATCH = Patch(
    name="offloaded_resize_embeddings",
    symptom=(
        "resize_token_embeddings with embed_tokens or lm_head offloaded, then a forward: Trying to "
        'set a tensor of shape ... in "weight" (which has shape ...), this looks incorrect'
    ),
    affects=("transformers", "accelerate"),
    links=("https://github.com/huggingface/transformers/issues/30048",),
)


@PATCH.probe
def resize_ignores_offloading() -> Finding:
    """Check whether the resize still leaves the hook as it is."""
    code = code_at("transformers.modeling_utils", "PreTrainedModel._resize_token_embeddings")
    changes = "weights_map" in code.co_names
    return fixed_if(changes, "resize_token_embeddings changes what the hook loads")


@PATCH.around("transformers.modeling_utils", "PreTrainedModel.resize_token_embeddings")
def resize_token_embeddings(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Embeddings and head stay onloaded until they are tied again."""
    with _onloaded_embeddings(self, keep_changes=True):
        result = original(self, *args, **kwargs)
    _forget_freed(self)
    return result


@PATCH.around("accelerate.hooks", "AlignDevicesHook.init_hook")
def init_hook(original: Any, self: Any, module: Any) -> Any:
    """A resize adds the hook again, while the weight is on meta.

    accelerate takes this for the place where the weight was before the dispatch, and PEFT for a
    weight in a safetensors file.
    """
    before = vars(self).get("original_devices") or {}
    module = original(self, module)
    for name, device in before.items():
        now = self.original_devices.get(name)
        if now is not None and now.type == "meta":
            self.original_devices[name] = device
    return module


@PATCH.around("transformers.modeling_utils", "PreTrainedModel.tie_weights")
def tie_weights(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with _onloaded_embeddings(self):
        return original(self, *args, **kwargs)


@PATCH.around("transformers.modeling_utils", "PreTrainedModel._get_resized_embeddings")
def get_resized_embeddings(
    original: Any, self: Any, old_embeddings: Any, *args: Any, **kwargs: Any
) -> Any:
    """Only this method resizes the per-layer embeddings."""
    with onloaded(old_embeddings, keep_changes=True):
        return original(self, old_embeddings, *args, **kwargs)


def _forget_freed(model: Any) -> None:
    """Remove addresses of freed weights from accelerate's table of tied weights.

    A weight that is read from the disk may get the address of the old embeddings, and accelerate
    would use the new embeddings instead.
    """
    hooks = [*offload_hooks(model.modules())]
    if not hooks:
        return
    used = {address(weight) for weight in (*model.parameters(), *model.buffers())}
    for hook in hooks:
        used.update(map(address, (host_tensors(hook.weights_map) or {}).values()))
    for hook in hooks:
        table = hook.tied_params_map or {}
        for freed in table.keys() - used:
            del table[freed]


@contextmanager
def _onloaded_embeddings(model: Any, *, keep_changes: bool = False) -> Iterator[None]:
    """Onload the input and output embeddings.  The block may replace them by other modules."""
    loaded = []
    for get_embeddings in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            module = get_embeddings()
        except (AttributeError, NotImplementedError):  # a model without token embeddings
            continue
        hook = None if module is None else onload(module)
        if hook is not None:
            loaded.append((get_embeddings, hook))
    completed = False
    try:
        yield
        completed = True
    finally:
        for get_embeddings, hook in loaded:
            offload(get_embeddings(), hook, keep_changes=keep_changes and completed)
