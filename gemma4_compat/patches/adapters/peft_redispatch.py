"""Loading an adapter dispatches the base model again.

``PeftModel.from_pretrained`` removes all accelerate hooks from a base model whose ``hf_device_map``
contains "cpu" or "disk", and ``load_adapter`` then calls ``get_balanced_memory``,
``infer_auto_device_map`` and ``dispatch_model`` on the whole model.  The inferred map replaces the
user's map: offloaded towers go back to the GPU without a warning, layers move to a second GPU,
disk-offloaded weights are written again, and on a full GPU the dispatch meets further bugs.

Without the second dispatch, another bug shows: PEFT treats an offloaded weight as a weight on the
meta device.  New adapters are put on meta, merging skips the weight, and adapters that compute with
the base weight themselves (DoRA, HRA) fail or give wrong results without an error.

The fix does not change the placement of the base model.  While PEFT loads, ``hf_device_map`` names
the execution devices of modules, so PEFT has no reason to dispatch.  The hook of an offloaded base
layer onloads it to its execution device while its adapter is created or merged, and during the
whole forward of the adapter layer.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at
from ...model.hooks import offload_hook, offloaded_value
from ...objects import shadowed
from ...runtime.host.onloading import executing_map, has_changed, onloaded
from ._adapter_layer import base_layer, onload_in_forward, unmerge

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="peft_redispatch",
    symptom=(
        "loading an adapter undoes the base model's offload, moves layers to another GPU, or "
        "raises (meta tensors, KeyError: 22) while or after PEFT dispatches the model again"
    ),
    affects=("transformers", "accelerate", "peft"),
    # These bugs show if the base model stays offloaded; PEFT's own dispatch hides them.
    requires=("offloaded_adapter_embeddings", "offloaded_modules_to_save", "offloaded_tie_check"),
    links=(
        "https://github.com/huggingface/peft/issues/3169",
        "https://github.com/huggingface/transformers/issues/45482",
    ),
)

_PLACEMENT = ("device_map", "max_memory", "offload_dir", "offload_folder", "offload_buffers")


@PATCH.probe
def load_adapter_dispatches() -> Finding:
    """Check whether load_adapter calls dispatch_model."""
    code = code_at("peft.peft_model", "PeftModel.load_adapter")
    dispatches = "dispatch_model" in code.co_names
    return fixed_if(not dispatches, "PeftModel.load_adapter no longer dispatches the base model")


@PATCH.around("peft.peft_model", "PeftModel.from_pretrained")
def from_pretrained(original: Any, cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    with executing_map(model):
        return original(cls, model, *args, **kwargs)


@PATCH.around("peft.peft_model", "PeftModel.load_adapter")
def peft_load_adapter(original: Any, self: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
    from peft import PeftModel

    if not isinstance(self, PeftModel):  # a PeftMixedModel: PEFT has removed its hooks by now
        return original(self, model_id, *args, **kwargs)
    given = [name for name in _PLACEMENT if kwargs.pop(name, None) is not None]
    if given:
        logger.warning(
            "PEFT's load_adapter ignores %s: the base model stays where it is, and the adapter "
            "goes to the execution devices of its layers.  To place the model differently, pass "
            "device_map (and max_memory, offload_folder) to the base model's from_pretrained; run "
            "gemma4-compat map MODEL --map MAP to see the result.",
            ", ".join(given),
        )
    with executing_map(self) as devices:
        if devices and len(args) < 3 and kwargs.get("torch_device") is None:
            kwargs["torch_device"] = _main_device(devices)
        return original(self, model_id, *args, **kwargs)


@PATCH.around("peft.tuners.tuners_utils", "BaseTuner.inject_adapter")
def inject_adapter(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    create = self._create_and_replace

    @wraps(create)
    def create_and_replace(
        config: Any, adapter_name: str, target: Any, *args: Any, **kwargs: Any
    ) -> Any:
        base = base_layer(target)
        hook = offload_hook(base)

        def changed() -> bool:
            """PiSSA, OLoRA, KaSA and others change the base weight."""
            return _takes_share(config) or has_changed(base, hook)

        with onloaded(base, keep_changes=changed):
            return create(config, adapter_name, target, *args, **kwargs)

    with shadowed(self, _create_and_replace=create_and_replace):
        result = original(self, *args, **kwargs)
    for layer in self.model.modules():
        onload_in_forward(layer)
    return result


@PATCH.around("peft.tuners.tuners_utils", "set_adapter")
def set_adapter(original: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT unmerges merged layers here, and does not onload their weights, as elsewhere."""
    model = args[0] if args else kwargs["model"]
    for layer in model.modules():
        base = base_layer(layer)
        if base is not layer and getattr(layer, "merged", False) and offload_hook(base):
            warnings.warn(
                "Adapter cannot be set when the model is merged. Unmerging the model first.",
                stacklevel=3,
            )
            unmerge(layer)
    return original(*args, **kwargs)


@PATCH.around("peft.tuners.tuners_utils", "BaseTunerLayer._move_adapter_to_device_of_base_layer")
@PATCH.around(
    "peft.tuners.unilora.layer",
    "UniLoraLayer._move_adapter_to_device_of_base_layer",
    when="peft>=0.20",
)
@PATCH.around("peft.tuners.unilora.layer", "UniLoraLayer.update_scaling", when="peft>=0.20")
def place_adapter(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """UniLoRA also has tensors that are not parameters."""
    with onloaded(self.get_base_layer()):
        return original(self, *args, **kwargs)


@PATCH.around("peft.tuners.frod.model", "FrodModel._init_frod_projections", when="peft>=0.20")
def frod_init_projections(original: Any, self: Any, config: Any, adapter_name: str) -> Any:
    """FRoD decomposes the weights of all target layers in host memory before injection."""
    import torch
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    prepared = self._prepare_adapter_config(config, self.get_model_config(self.model))
    prepared = _maybe_include_all_linear_layers(prepared, self.model)
    with ExitStack() as stack:
        for name, module in self.model.named_modules():
            weight = module._parameters.get("weight")
            if type(weight) is torch.nn.Parameter and weight.is_meta:  # not quantized
                if self._check_target_module_exists(prepared, name):
                    value = offloaded_value(module, "weight")
                    if value is not None:
                        stack.enter_context(shadowed(module, weight=value))
        return original(self, config, adapter_name)


@PATCH.around("peft.tuners.tuners_utils", "onload_layer")
@contextmanager
def onload_layer(original: Any, layer: Any) -> Iterator[None]:
    """PEFT onloads weights for merging, but misses some hooks and loses some changes.

    It misses a hook inside ``SequentialHook``, and does not store the change for a module that is
    tied to the layer.  PEFT's own dispatch creates neither situation.
    """
    with onloaded(base_layer(layer), keep_changes=True), original(layer):
        yield


def _takes_share(config: Any) -> bool:
    """Whether LoRA's initialization changes the base weight, even a quantized one."""
    method = getattr(config, "init_lora_weights", None)
    return isinstance(method, str) and method.lower() not in ("gaussian", "eva")


def _main_device(devices: dict[str, Any]) -> str:
    """A device that the model uses, a GPU if possible, to load the adapter file to."""
    import torch

    used = map(torch.device, devices.values())
    return str(next((device for device in used if device.type != "cpu"), "cpu"))
