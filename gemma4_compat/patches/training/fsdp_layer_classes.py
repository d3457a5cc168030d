"""FSDP2 gathers the layers of the towers, which only processes with images or sound run.

Without ``fsdp_transformer_layer_cls_to_wrap``, accelerate makes a unit of each module whose class
is in the model's ``_no_split_modules``.  For Gemma 4 and 3n these are also classes in the towers.
Each forward of a unit gathers its weights, and all processes must take part in that.  A process
whose batch is text alone does not run the towers, so the processes wait for each other, or gloo
aborts.  A model of text alone has no such classes, and accelerate raises an error.

The fix names the classes of the decoder layers only.  The towers become a part of the root unit,
which is sharded, too, and which each process gathers.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at
from ...model.parts import base_of, decoder_layers, is_ours
from ...objects import shadowed

PATCH = Patch(
    name="fsdp_layer_classes",
    symptom=(
        "with FSDP2, training hangs if only some processes have images (gloo aborts); Could not "
        "find the transformer layer class Gemma4AudioLayer in the model"
    ),
    affects=("transformers", "accelerate"),
    links=("https://github.com/NVIDIA-NeMo/Automodel/pull/2763",),
)

_PLUGIN = "accelerate.utils.dataclasses"


@PATCH.probe
def all_classes_are_wrapped() -> Finding:
    """Check whether accelerate reads the names from the model."""
    code = code_at(_PLUGIN, "FullyShardedDataParallelPlugin.set_auto_wrap_policy")
    names = (*code.co_names, *code.co_consts)
    return fixed_if("_no_split_modules" not in names, "accelerate does not read _no_split_modules")


@PATCH.around(_PLUGIN, "FullyShardedDataParallelPlugin.set_auto_wrap_policy")
def set_auto_wrap_policy(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The first call, before FSDP2 shards; it sets the names for the calls that follow."""
    base = base_of(model)
    chosen = self.transformer_cls_names_to_wrap is not None
    if chosen or self.fsdp_version != 2 or not is_ours(base):
        return original(self, model, *args, **kwargs)
    names = decoder_layers(name for name, _ in base.named_modules()).values()
    classes = sorted({type(base.get_submodule(name)).__name__ for name in names})
    with shadowed(model, _no_split_modules=classes):
        return original(self, model, *args, **kwargs)
