"""PEFT copies an offloaded module without its weights.

For each name in ``modules_to_save`` PEFT makes a deep copy of the module, and trains, saves and
uses the copy.  ``trainable_token_indices`` copies rows of the embedding.  Outside its forward, the
weights of an offloaded module are on meta, so the copies are on meta, too.  A copy of a module also
has a copy of accelerate's hook, which still loads the *original* weights: the weights of the
adapter file have no effect, and training changes nothing.  The saved weights are on meta.  Token
rows raise an error about the meta device.

The fix onloads the module while PEFT copies it.  The copy stays on the module's execution device,
like every other adapter weight; its hooks move inputs there, and load no weights.  The original
stays offloaded.  A layer with trainable tokens onloads its embedding whenever it computes with the
whole weight.

A head that is tied to the embedding gets a layer that uses the embedding's adapter.  For a second
adapter PEFT replaces this layer.  On a split model, the new layer always uses the second adapter,
even if another one is active; on a whole model it raises an error.  The fix keeps the first layer.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from ...engine.probing import code_at
from ...model.hooks import hooks_of, offload_hook, placed_model
from ...objects import hidden
from ...runtime.host.onloading import onloaded
from ._adapter_layer import onload_in_forward

PATCH = Patch(
    name="offloaded_modules_to_save",
    symptom=(
        "modules_to_save on an offloaded module: its trained weights have no effect, or Cannot "
        "copy out of meta tensor; no data! when saving; trainable_token_indices: Tensor on device "
        "meta is not on the expected device"
    ),
    affects=("transformers", "accelerate", "peft"),
    unreported=("Found by the tests of this package; no report is known upstream."),
)


@PATCH.probe
def copy_is_deep() -> Finding:
    """Check the code for a plain deep copy; running it would have side effects on classes."""
    code = code_at("peft.utils.other", "ModulesToSaveWrapper.update")
    if "deepcopy" not in code.co_names:
        return drifted("ModulesToSaveWrapper.update makes no deep copy")
    loads = {"align_module_device", "onload_layer", "pre_forward"}.intersection(code.co_names)
    return fixed_if(loads, "ModulesToSaveWrapper loads the module that it copies")


@PATCH.around("peft.utils.other", "ModulesToSaveWrapper.update")
def modules_to_save_wrapper_update(
    original: Any, self: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    modules = dict(self.original_module.named_modules())
    offloaded = [module for module in modules.values() if offload_hook(module) is not None]
    if not offloaded or adapter_name in self.modules_to_save:
        return original(self, adapter_name, *args, **kwargs)
    with ExitStack() as stack:
        stack.enter_context(onloaded(*offloaded))
        for module in filter(hooks_of, modules.values()):
            stack.enter_context(hidden(module, "_hf_hook", "_old_forward", "forward"))
        result = original(self, adapter_name, *args, **kwargs)
    _hook_copy(self.modules_to_save[adapter_name], modules)
    return result


@PATCH.around("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer.update_layer")
@PATCH.around("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer.get_merged_weights")
def trainable_tokens_read_the_weight(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    onload_in_forward(self)
    with onloaded(self.get_base_layer()):
        return original(self, *args, **kwargs)


@PATCH.around("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer.merge")
@PATCH.around("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer.unmerge")
def trainable_tokens_merge(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with onloaded(self.get_base_layer(), keep_changes=True):
        return original(self, *args, **kwargs)


@PATCH.around("peft.tuners.trainable_tokens.model", "TrainableTokensModel.inject_adapter")
def trainable_tokens_inject_adapter(
    original: Any, self: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    tied = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TrainableTokensLayer) and module.tied_adapter is not None
    }
    result = original(self, model, *args, **kwargs)
    if placed_model(model) is not None:
        for name, layer in tied.items():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, layer)
    return result


def _hook_copy(copy: Any, originals: dict[str, Any]) -> None:
    """Give a module's copy hooks as on the original, but without offloading."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name, module in copy.named_modules():
        for hook in hooks_of(originals[name]):
            if isinstance(hook, AlignDevicesHook):
                placed = AlignDevicesHook(
                    hook.execution_device,
                    io_same_device=hook.io_same_device,
                    skip_keys=hook.skip_keys,
                )
                add_hook_to_module(module, placed, append=True)
