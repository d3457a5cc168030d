"""PEFT neither saves nor loads the embeddings in an adapter file if they are offloaded.

An adapter on ``embed_tokens`` or ``lm_head``, and every adapter of a model whose vocabulary was
resized, is saved with the weight of these layers.  PEFT reads this weight from the model's state
dict and loads it with ``load_state_dict``.  An offloaded weight is on meta: saving raises an error,
and loading copies into the meta tensor, which has no effect.

The fix reads such a weight from the accelerate hook that offloads it, and makes the hook load the
weight of the adapter file.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at
from ...model.hooks import offload_hook, offloaded_value
from ...runtime.host.onloading import onloaded, tied_copies_follow

PATCH = Patch(
    name="offloaded_adapter_embeddings",
    symptom=(
        "saving an adapter on offloaded embeddings: Cannot copy out of meta tensor; no data!; "
        "loading one leaves the embeddings as they were"
    ),
    affects=("transformers", "accelerate", "peft"),
    unreported=("Found by the tests of this package; no report is known upstream."),
)


@PATCH.probe
def state_dict_is_taken_as_it_is() -> Finding:
    """Check whether PEFT handles accelerate's hooks when it saves."""
    code = code_at("peft.utils.save_and_load", "get_peft_model_state_dict")
    known = {"_hf_hook", "align_module_device", "get_state_dict_offloaded_model"} & {*code.co_names}
    return fixed_if(known, "get_peft_model_state_dict handles offloaded weights")


@PATCH.around("peft.utils.save_and_load", "get_peft_model_state_dict")
def get_peft_model_state_dict(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    state_dict = original(model, *args, **kwargs)
    for name, tensor in state_dict.items():
        if getattr(tensor, "is_meta", False):
            value = offloaded_value(model, name)
            if value is not None:
                state_dict[name] = value
    return state_dict


@PATCH.around("peft.utils.save_and_load", "set_peft_model_state_dict")
def set_peft_model_state_dict(
    original: Any, model: Any, peft_model_state_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    brought = {name.rpartition(".")[0] for name in peft_model_state_dict}
    offloaded = [
        module
        for name, module in model.named_modules()
        if name in brought and offload_hook(module) is not None
    ]
    with tied_copies_follow(model, offloaded), onloaded(*offloaded, keep_changes=True):
        return original(model, peft_model_state_dict, *args, **kwargs)
